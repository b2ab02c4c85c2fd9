"""A model and its optimizers, looked at once: names, ownership, what can be folded; revalidated cheaply."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from halfstep.engine.replicas.collectives import plain
from halfstep.errors import MisuseError, UnsupportedError, counted

FOLDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
Optimizer = torch.optim.Optimizer
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_REPLICATED = ("DistributedDataParallel", "DataParallel")


class Binding:
    """What the manager knows of one (model, optimizers) pair. Building it checks ownership and kinds.

    ``parameters`` are in ``model.parameters()`` order, frozen ones included (they may be unfrozen later); ``names`` go
    with them, prefixed by the position of their module where several modules were given.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], key: tuple[int, ...]) -> None:
        self.key = key
        self.modules = tuple(modules)
        self.optimizers = tuple(optimizers)
        named: dict[Tensor, str] = {}
        for position, module in enumerate(self.modules):
            for name, parameter in module.named_parameters():
                name = plain_name(name, module)
                named.setdefault(parameter, f"{position}.{name}" if len(self.modules) > 1 else name)
        self.parameters: list[Tensor] = list(named)
        self.names: list[str] = list(named.values())
        self.ids = frozenset(map(id, self.parameters))
        for optimizer in self.optimizers:
            _refuse_closure(optimizer)
        self._require_ownership()
        self._require_dtypes()
        self.dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in self.parameters if p.requires_grad})
        self.half_parameters = sum(p.dtype == torch.bfloat16 for p in self.parameters if p.requires_grad)
        self._groups = self._fingerprint()
        self._states = [optimizer.state for optimizer in self.optimizers]
        self.fold_types = all(_can_fold(optimizer) for optimizer in self.optimizers)
        self.device = next(p.device for p in self.parameters if p.requires_grad)
        self.plain = False
        self.sparse = False
        self.sharded = any(plain(p) is not p for p in self.parameters)
        if self.sharded:
            self._require_sharded_kernels()
        self._looked: Any = None
        self._foldable = False
        self._lacking: list[tuple[Optimizer, dict[str, Any], list[Tensor], bool]] = []
        self.relaid: list[str] = []

    def _fingerprint(self) -> list[tuple[dict[str, Any], list[Tensor], int, Any]]:
        return [
            (group, group["params"], len(group["params"]), group.get("fused"))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    def current(self) -> bool:
        """Whether what was looked at still holds: the same groups, lengths and fused flags, nothing unfrozen."""
        count = 0
        for optimizer in self.optimizers:
            count += len(optimizer.param_groups)
        if count != len(self._groups):
            return False
        position = 0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                known, parameters, length, fused = self._groups[position]
                position += 1
                same = group is known and group["params"] is parameters and len(parameters) == length
                if not same or group.get("fused") is not fused:
                    return False
        return not any(p.requires_grad for p in self._orphans)

    def notice_load(self) -> None:
        """Look at layouts again where an optimizer's state was loaded since the last call."""
        states = self._states
        if any(optimizer.state is not state for optimizer, state in zip(self.optimizers, states, strict=True)):
            self._states = [optimizer.state for optimizer in self.optimizers]
            self._looked = None

    def gradients(self) -> list[Tensor]:
        """The gradients that are there, in the order of ``parameters``; of sharded ones what is stored here."""
        found = [g for g in [p.grad for p in self.parameters] if g is not None]
        return [plain(g) for g in found] if self.sharded else found

    def having(self) -> list[Tensor]:
        """The parameters that go with :meth:`gradients`."""
        return [p for p in self.parameters if p.grad is not None]

    def named(self) -> list[str]:
        """The names that go with :meth:`gradients`."""
        return [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def lrs(self) -> list[float | Tensor]:
        """The learning rate of every parameter group, in order; tensors are copied, they change in place."""
        return [
            lr.detach().clone() if isinstance(lr, Tensor) else lr
            for lr in (group.get("lr", 0.0) for optimizer in self.optimizers for group in optimizer.param_groups)
        ]

    def name_of(self, parameter: Tensor) -> str:
        for name, own in zip(self.names, self.parameters, strict=True):
            if own is parameter:
                return name
        return f"a parameter of shape {tuple(parameter.shape)}"

    # --- gradients and folding ---

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Learn what kind of gradients these are; again only where other parameters hold one, or state was loaded."""
        key: Any = len(gradients)
        if key != len(self.parameters):
            key = tuple(p.grad is None for p in self.parameters)
        if key == self._looked:
            return
        self._looked = key
        self._lacking = []
        first = gradients[0]
        strided = not any(g.is_sparse or g.layout != torch.strided for g in gradients)
        self.sparse = any(g.is_sparse for g in gradients)
        self.plain = strided and all(g.dtype == torch.float32 and g.device == first.device for g in gradients)
        self._foldable = strided and self.fold_types and all(g.dtype != torch.float64 for g in gradients)
        if self._foldable:
            self._look_at_layouts()
            self._look_at_momentum()

    def folds(self) -> bool:
        """Whether one factor handed to the fused optimizers does all the unscaling and clipping."""
        return self._foldable and not any(_pre_hooked(optimizer) for optimizer in self.optimizers)

    def _look_at_layouts(self) -> None:
        """Fused kernels walk parameter, gradient and state in storage order: all must lie alike.

        State in another order (a checkpoint written without channels_last) is laid out again, values unchanged; a
        gradient in another order or dtype (assigned by hand) takes the multi-tensor path.
        """
        for name, parameter in zip(self.names, self.parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype != parameter.dtype or gradient.stride() != parameter.stride():
                self._foldable = False
            for optimizer in self.optimizers:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    alike = not isinstance(value, Tensor) or value.dim() == 0 or value.shape != parameter.shape
                    if not alike and value.stride() != parameter.stride():
                        state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                        self.relaid.append(f"{name}: {key}")

    def _look_at_momentum(self) -> None:
        """Which momentum buffers fused SGD still has to make."""
        self._lacking = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
                having = [p for p in group["params"] if p.grad is not None] if group["momentum"] != 0 else []
                new = [p for p in having if optimizer.state.get(p, {}).get("momentum_buffer") is None]
                if new:
                    self._lacking.append((optimizer, group, new, len(new) < len(having)))

    @property
    def damped(self) -> bool:
        """Whether fused SGD still has to make damped momentum buffers: not before it is known that it will step."""
        return any(group["dampening"] != 0 for _, group, _, _ in self._lacking)

    def seed_momentum(self, factor: float | None) -> None:
        """Make the momentum buffers that a fused kernel would spoil.

        It leaves a new buffer uninitialised where the first attempt is skipped, and fails where some parameters of a
        group have one and others do not. From zeros the first momentum is the gradient, as it should be. A damped one
        starts from b with momentum·b + (1 - dampening)·g = g, where ``factor`` is what the gradient is divided by.
        ``factor`` None: the outcome is not known yet; else the update will be applied, and kernels make whole groups
        of buffers themselves.
        """
        lacking, self._lacking = self._lacking, []
        for optimizer, group, new, mixed in lacking:
            if factor is not None and not mixed:
                continue
            for parameter in new:
                buffer = torch.zeros_like(parameter)
                if group["dampening"] != 0 and factor is not None:
                    assert parameter.grad is not None
                    direction = parameter.grad / (-factor if group["maximize"] else factor)
                    direction = direction + group["weight_decay"] * parameter.detach()
                    buffer = direction.mul_(group["dampening"] / group["momentum"])
                optimizer.state[parameter]["momentum_buffer"] = buffer

    # --- ownership ---

    def _require_ownership(self) -> None:
        owned: dict[int, Tensor] = {}
        for position, optimizer in enumerate(self.optimizers):
            own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            twice = [p for key, p in own.items() if key in owned]
            if twice:
                kinds = [type(o).__name__ for o in self.optimizers[: position + 1]]
                raise MisuseError(
                    f"{counted(len(twice), 'parameter')} would be updated twice from one gradient, being in more than "
                    f"one of {', '.join(kinds[:-1])} and {kinds[-1]}: {_some([self.name_of(p) for p in twice])}",
                    "give every parameter to one optimizer (and every optimizer to step once); for another learning "
                    "rate or weight decay, a parameter group",
                )
            owned |= own
        missing = [
            n for n, p in zip(self.names, self.parameters, strict=True) if p.requires_grad and id(p) not in owned
        ]
        if missing:
            raise MisuseError(
                f"{len(missing)} trainable parameters of the model are not in the optimizer: {_some(missing)}",
                "give the optimizer model.parameters(), or freeze them with requires_grad_(False); after a model was "
                "moved, wrapped or replaced, build the optimizer from the new one",
            )
        strangers = [p for key, p in owned.items() if key not in self.ids]
        if strangers:
            shapes = _some([str(tuple(p.shape)) for p in strangers])
            raise MisuseError(
                f"the optimizer updates {len(strangers)} parameters that the model does not have, of shapes {shapes}: "
                "they would be changed without being clipped or named",
                "pass every module it trains, step((model, loss_module), optimizer), or the optimizer of this model",
            )
        self._orphans = [p for p in self.parameters if id(p) not in owned]
        if not any(p.requires_grad for p in self.parameters):
            raise MisuseError("no parameter of the model requires a gradient", "requires_grad_(True) on what to train")

    def _require_dtypes(self) -> None:
        half = [
            n for n, p in zip(self.names, self.parameters, strict=True) if p.requires_grad and p.dtype == torch.float16
        ]
        if half:
            raise UnsupportedError(
                f"{len(half)} trainable parameters are FP16 ({_some(half)}): an update of 1e-4 of a weight rounds "
                "away, and gradients below 6e-8 are zero",
                "keep the parameters in FP32 (model.float()); autocast runs the operators in half precision. "
                "BF16 parameters are accepted",
            )

    def _require_sharded_kernels(self) -> None:
        kinds = {
            type(optimizer).__name__
            for optimizer in self.optimizers
            if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))
            and any(group.get("fused") for group in optimizer.param_groups)
        }
        if kinds:
            raise UnsupportedError(
                f"torch has no fused {' or '.join(sorted(kinds))} for sharded parameters",
                "fused=False; Adam and AdamW have one",
            )


def plain_name(name: str, module: nn.Module) -> str:
    """A parameter's name as the user wrote it, without what wrappers (compile, FSDP, checkpointing, DDP) put in."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name.removeprefix("module.") if type(module).__name__ in _REPLICATED else name


def modules_of(model: Any) -> tuple[nn.Module, ...]:
    """``model`` as given to step -> its modules: one, or a sequence of them."""
    if isinstance(model, nn.Module):
        return (model,)
    if isinstance(model, (list, tuple)) and model and all(isinstance(m, nn.Module) for m in model):
        return tuple(model)
    raise MisuseError(
        f"step was given a model of type {type(model).__name__}", "step(model, optimizer): a module, or several"
    )


def optimizers_of(optimizer: Any) -> tuple[Optimizer, ...]:
    """``optimizer`` as given to step -> the optimizers behind it (a wrapper that holds one is opened)."""
    items = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    out = tuple(items)
    if not out or not all(isinstance(o, Optimizer) for o in out):
        kinds = ", ".join(type(o).__name__ for o in out) or "nothing"
        raise MisuseError(
            f"step was given an optimizer of type {kinds}",
            "step(model, optimizer): a torch.optim.Optimizer, or several that share this backward",
        )
    return out


def _can_fold(optimizer: Optimizer) -> bool:
    return type(optimizer) in FOLDING and all(group.get("fused") is True for group in optimizer.param_groups)


def _pre_hooked(optimizer: Optimizer) -> bool:
    """Whether somebody looks at gradients right before the optimizer does: then they must be the real ones."""
    if optimizer._optimizer_step_pre_hooks:
        return True
    hooks: Iterable[Any] = _global_optimizer_pre_hooks.values()
    return any(not (getattr(hook, "__module__", "") or "").startswith("halfstep") for hook in hooks)


def _refuse_closure(optimizer: Optimizer) -> None:
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step)
    try:
        closure = inspect.signature(step).parameters.get("closure")
    except (TypeError, ValueError):
        return
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the loss again inside its update (a closure): loss scale, "
            "accumulation and skipping cannot reach in there",
            "run it in FP32 with optimizer.step(closure) by hand, or take an optimizer that steps once per gradient",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
