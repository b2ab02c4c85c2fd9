"""Root modules: those called by no other module. Their mode and examples; inner calls cost one comparison.

A module's mode matters where something inside it acts differently in training and evaluation (dropout, batch
statistics); parts that are frozen do not count, since evaluation mode is right for them.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import ModuleCalled, ModuleSeen, Place
from halfstep.launch import hide
from halfstep.watch.autocasts import Autocasts
from halfstep.watch.patches import Patches, not_now, uncompiled

if TYPE_CHECKING:
    from halfstep.watch.session import Session


class Modules:
    def __init__(self, session: Session, autocasts: Autocasts) -> None:
        self._session = session
        self._autocasts = autocasts
        self._local = threading.local()
        self._modes: dict[int, tuple[weakref.ref[torch.nn.Module], Place | None]] = {}  # where a mode was set last
        self._setting = 0
        self._setting_at: Place | None = None
        self._renewing = 0  # inside code that renews batch statistics on purpose
        self._renewed = -1  # contributions begun when batch statistics were reset last
        self._facts: dict[int, tuple[int, tuple[int, ...]]] = {}  # root -> optimizers known, those that own of it
        self._inputs: dict[int, weakref.ref[torch.Tensor]] = {}
        self._outputs: dict[int, list[weakref.ref[Any]]] = {}  # root -> storages it returned last
        self.roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.entries: list[Callable[[torch.nn.Module, Any, Any, Place | None], None]] = []  # told of each root's call
        self.exits: list[Callable[[torch.nn.Module, Any], None]] = []  # and of what it returned
        self.inner: dict[type, Callable[[torch.nn.Module], None]] = {}  # told of calls by other modules, by class

    def install(self, patches: Patches) -> None:
        original = torch.nn.Module.__call__
        local = self._local

        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not_now() or not patches.live or getattr(local, "inside", False):
                if type(module) in self.inner and patches.live and not not_now():
                    self._called_inside(module)
                return original(module, *args, **kwargs)
            local.inside = True
            patches.observe("module call", self._called, module, args, kwargs)
            try:
                result = original(module, *args, **kwargs)
            finally:
                local.inside = False
            patches.observe("module return", self._returned, module, result)
            return result

        hide(call)
        uncompiled(call, inner=False)
        patches.replace(torch.nn.Module, "__call__", call)
        patches.around(torch.nn.Module, "train", self._before_mode, self._after_mode, self._failed_mode)
        patches.around(torch.optim.swa_utils, "update_bn", self._before_renew, self._after_renew, self._failed_renew)
        norm = torch.nn.modules.batchnorm._NormBase
        patches.around(norm, "reset_running_stats", None, self._after_reset)

    # -- modes ---------------------------------------------------------------------------------------------------

    def _before_mode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._setting:
            self._setting_at = self._session.place()
        self._setting += 1
        if len(self._modes) > _MODES:
            self._modes = {key: known for key, known in self._modes.items() if known[0]() is not None}
        self._modes[id(args[0])] = (weakref.ref(args[0]), self._setting_at)

    def _after_mode(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._setting -= 1

    def _failed_mode(self, token: Any, error: BaseException) -> None:
        self._setting -= 1

    def _before_renew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._renewing += 1

    def _after_renew(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._renewing -= 1

    def _failed_renew(self, token: Any, error: BaseException) -> None:
        self._renewing -= 1

    def _after_reset(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._renewed = self._session.stream.micro

    def name(self, parameter: torch.Tensor) -> str | None:
        """What a root module calls this parameter."""
        for ref in self.roots.values():
            module = ref()
            if module is not None:
                found = next((n for n, p in module.named_parameters() if p is parameter), None)
                if found is not None:
                    return found
        return None

    # -- calls ---------------------------------------------------------------------------------------------------

    def _called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        ident = self._session.ident("module", module)
        known = self.roots.get(ident)
        if known is None:
            self.roots[ident] = weakref.ref(module)
            self._seen(module, ident)
        at = self._session.place()
        for entry in self.entries:
            entry(module, args, kwargs, at)
        mode = self._modes.get(id(module))
        before = self._inputs.get(ident)
        if first is not None:
            self._inputs[ident] = weakref.ref(first)
        self._session.stream.emit(
            ModuleCalled,
            at=at,
            module=ident,
            type=type(module).__name__,
            training=module.training,
            grad_enabled=torch.is_grad_enabled(),
            autocast=self._autocasts.last_half() if self._autocasts.inside(_device(first)) else None,
            examples=int(first.shape[0]) if first is not None and first.ndim else None,
            optimizers=self._owners(module, ident),
            thread=threading.get_ident(),
            carried=self._is_carried(ident, args, kwargs),
            mode_at=mode[1] if mode is not None and mode[0]() is module else None,
            repeated=first is not None and before is not None and before() is first,
            own=self._renewing > 0 or self._renewed == self._session.stream.micro,
        )

    def _called_inside(self, module: torch.nn.Module) -> None:
        try:
            with self._session.look.silent():
                self.inner[type(module)](module)
        except Exception as error:
            self._session.fault("inner module call", error)

    def _returned(self, module: torch.nn.Module, result: Any) -> None:
        for leave in self.exits:
            leave(module, result)
        if torch.is_grad_enabled():
            ident = self._session.ident("module", module)
            self._outputs[ident] = [weakref.ref(t.untyped_storage()) for t in plain_tensors(result)]

    def _is_carried(self, ident: int, args: Any, kwargs: Any) -> bool:
        """Whether it is given what it returned the last time, detached or not: the state of a recurrence."""
        before = [storage for ref in self._outputs.get(ident, ()) if (storage := ref()) is not None]
        if not before:
            return False
        given = [t.untyped_storage() for t in plain_tensors((*args, *kwargs.values()))]
        return any(new is old for new in given for old in before)

    def owners(self, module: torch.nn.Module) -> tuple[int, ...]:
        """The optimizers that own some of this module's parameters."""
        return self._owners(module, self._session.ident("module", module))

    def _owners(self, module: torch.nn.Module, ident: int) -> tuple[int, ...]:
        """The optimizers that own some of its parameters; asked again once more optimizers are known."""
        newest = self._session.ledger.newest()
        told = self._facts.get(ident)
        if told is None or told[0] != newest:
            own = {id(p) for p in module.parameters()}
            owners = tuple(
                i
                for i, optimizer in self._session.ledger.optimizers()
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            )
            told = self._facts[ident] = (newest, owners)
        return told[1]

    def _seen(self, module: torch.nn.Module, ident: int) -> None:
        parameters = list(module.parameters())
        total = sum(p.numel() for p in parameters)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        norms = [m for m in module.modules() if isinstance(m, _NORMS)]
        self._session.stream.emit(
            ModuleSeen,
            module=ident,
            type=type(module).__name__,
            parameters=len(parameters),
            modal=dict(Counter(filter(None, map(_modal, module.modules())))) if 2 * trained >= total else {},
            fresh=bool(norms) and all(_fresh(m) for m in norms),
        )


_MODES = 1 << 14  # modules whose last mode is remembered, before those that are gone are dropped
_NORMS = torch.nn.modules.batchnorm._BatchNorm
_DROPOUTS = torch.nn.modules.dropout._DropoutNd


def _modal(module: torch.nn.Module) -> str | None:
    """The kind of a module that acts by its mode; None for others, and for those that are frozen."""
    if isinstance(module, _DROPOUTS):
        return type(module).__name__ if module.p > 0 else None
    if isinstance(module, _NORMS):
        frozen = any(not p.requires_grad for p in module.parameters())
        return type(module).__name__ if module.track_running_stats and not frozen else None
    dropout = getattr(module, "dropout", 0)
    if isinstance(module, (torch.nn.RNNBase, torch.nn.MultiheadAttention)) and isinstance(dropout, float) and dropout:
        return type(module).__name__
    code = getattr(inspect.getattr_static(type(module), "forward", None), "__code__", None)
    if not type(module).__module__.startswith("torch.") and code is not None and "training" in code.co_names:
        return type(module).__name__
    return None


def _fresh(norm: Any) -> bool:
    """Whether these batch statistics are what they were made with: mean 0, variance 1."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.device.type != "cpu":
        return False
    return not bool(mean.any()) and bool((variance == 1).all())


def plain_tensors(value: Any, depth: int = 3, most: int = 32) -> list[torch.Tensor]:
    """The dense tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, dict):
        value = tuple(value.values())
    if depth == 0 or not isinstance(value, (tuple, list)):
        return []
    return [t for v in value[:most] for t in plain_tensors(v, depth - 1, most)][:most]


def _device(tensor: torch.Tensor | None) -> str:
    return "cpu" if tensor is None else tensor.device.type
