"""Training and evaluation mode: which of them updates and evaluations really ran in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story, Update
from halfstep.events import Contribution, Event, Finding, ModuleCalled, ModuleSeen, Place, StateLoaded

_APART = 2  # updates between two evaluations: what is called without gradients more often belongs to training itself
_REPEATS = 3  # calls on one input: a spread is being sampled on purpose


@dataclass(slots=True)
class _Module:
    """A root module that acts by its mode."""

    seen: ModuleSeen
    last: bool | None = None  # mode of the last call
    evaluated: bool = False  # since the mode was set to evaluation, it was first called without gradients
    called: ModuleCalled | None = None  # with gradients, since the last contribution
    in_training: int = 0  # updates
    in_evaluation: int = 0
    kept: int = 0  # updates in an evaluation mode that an evaluation had set
    kept_first: tuple[int, ModuleCalled] | None = None
    chosen_at: Place | None = None
    ever_evaluation: bool = False
    updates: int = 0  # since it was last called without gradients
    phase: ModuleCalled | None = None
    phases: int = 0
    calls: int = 0
    repeats: int = 0
    direct: int = 0  # contributions whose loss was taken of its own output, and not of another module's behind it
    modes: dict[int, ModuleCalled] = field(default_factory=dict)  # contribution -> the call that it came from


class EvaluationModeKept(BaseCheck):
    """Updates while a module that acts by its mode is in evaluation mode, or evaluations of it in training mode."""

    rules = ("evaluation-mode-kept",)

    def __init__(self) -> None:
        self._modules: dict[int, _Module] = {}
        self._loaded = False
        self._last: int | None = None  # the root with parameters that was called last with gradients

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case ModuleSeen() if event.modal:
                self._modules[event.module] = _Module(event)
            case ModuleCalled():
                if event.grad_enabled and event.optimizers:
                    self._last = event.module
                module = self._modules.get(event.module)
                if module is not None:
                    self._called(module, event)
            case Contribution():
                for ident, module in self._modules.items():
                    module.direct += ident == self._last
                    called = module.called
                    if called is not None and set(called.optimizers) & set(event.optimizers):
                        module.modes[event.number] = called
                        if len(module.modes) > 64:
                            del module.modes[next(iter(module.modes))]
            case StateLoaded(kind="module"):
                self._loaded = True
            case _:
                pass
        return ()

    def _called(self, module: _Module, event: ModuleCalled) -> None:
        if event.training != module.last:
            module.evaluated = not event.training and not event.grad_enabled
            module.last = event.training
        module.ever_evaluation = module.ever_evaluation or not event.training
        if event.grad_enabled:
            module.called = event
        elif event.training and event.optimizers and not event.own:
            if module.updates >= _APART:
                module.phase = module.phase or event
                module.phases += 1
            module.calls += 1
            module.repeats += event.repeated
            module.updates = 0

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        if not update.applied:
            return ()
        for module in self._modules.values():
            calls = [module.modes[c.number] for c in update.live if c.number in module.modes]
            if not calls:
                continue
            module.updates += 1
            call = calls[-1]
            if call.training:
                module.in_training += 1
                continue
            module.in_evaluation += 1
            module.chosen_at = module.chosen_at or call.mode_at or call.at
            if module.evaluated:
                module.kept += 1
                module.kept_first = module.kept_first or (update.number, call)
        return ()

    def end(self, story: Story) -> Iterable[Finding]:
        for module in self._modules.values():
            if module.kept and module.kept_first is not None and (module.in_training or not self._loaded):
                yield self._kept(module, module.kept_first)
            elif module.in_evaluation and not module.in_training:
                yield self._never_trained(module)
            elif module.phase is not None and self._is_scored(module):
                yield self._evaluated_in_training(module, module.phase)

    @staticmethod
    def _is_scored(module: _Module) -> bool:
        """Not a generator whose samples are looked at, nor a spread sampled on purpose."""
        return module.direct > 0 and not module.ever_evaluation and module.repeats < _REPEATS

    def _kept(self, module: _Module, first: tuple[int, ModuleCalled]) -> Finding:
        number, call = first
        total = module.in_training + module.in_evaluation
        return Finding(
            rule="evaluation-mode-kept",
            severity="error",
            at=call.mode_at or call.at,
            update=number,
            count=module.kept,
            message=(
                f"{module.kept} of {total} updates, from number {number} on, ran while {call.type} was still in the "
                f"evaluation mode set here: {_what(module)} acted as in evaluation"
            ),
            evidence=self._evidence(module),
            fix="call model.train() at the start of each training epoch, after every evaluation",
        )

    def _never_trained(self, module: _Module) -> Finding:
        meant = self._loaded and not module.seen.fresh
        return Finding(
            rule="evaluation-mode-kept",
            severity="info" if meant else "warning",
            at=module.chosen_at,
            count=module.in_evaluation,
            message=(
                f"all {module.in_evaluation} updates ran while {module.seen.type} was in evaluation mode: "
                f"{_what(module)} acted as in evaluation"
                + (", over batch statistics that never saw a batch" if module.seen.fresh else "")
            ),
            evidence=self._evidence(module),
            fix="call model.train() before training (and eval() only on the parts that are frozen on purpose)",
        )

    def _evaluated_in_training(self, module: _Module, phase: ModuleCalled) -> Finding:
        return Finding(
            rule="evaluation-mode-kept",
            severity="warning",
            at=phase.at,
            count=module.phases,
            message=(
                f"{phase.type} was evaluated {module.phases} times (without gradients, between updates) and never in "
                f"evaluation mode: {_what(module)} acted as in training"
            ),
            evidence=self._evidence(module),
            fix="model.eval() before the evaluation, model.train() after it",
        )

    def _evidence(self, module: _Module) -> dict[str, object]:
        return {
            "updates_in_training_mode": module.in_training,
            "updates_in_evaluation_mode": module.in_evaluation,
            "modules_that_act_by_mode": dict(module.seen.modal),
        }


def _what(module: _Module) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in module.seen.modal.items())
