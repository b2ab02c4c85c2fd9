"""The exception that ends a script: whether it came from a custom autograd function, and from which part of it."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.autograd.function import Function, FunctionCtx

from halfstep.events import FunctionFailed, Place
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_USED = "_fwd_used_autocast"  # what `custom_fwd` leaves on a context for `custom_bwd`
_PHASES = {"forward": "forward", "backward": "backward", "vjp": "backward", "setup_context": "forward"}


class Failures:
    def __init__(self, session: Session) -> None:
        self._session = session

    def install(self, patches: Patches) -> None:
        pass

    def raised(self, error: BaseException) -> None:
        """Told before the exception itself is: its frames still hold what they worked on."""
        found: FunctionFailed | None = None
        for tb in _frames(error.__traceback__):
            code = tb.tb_frame.f_code
            inner = found is not None and code.co_name == "_call_impl"
            if inner and found is not None and found.phase == "backward":
                found = FunctionFailed(
                    at=found.at, function=found.function, phase="backward", recomputing=True, wrapped=found.wrapped
                )
            if code.co_name == "decorate_bwd":
                found = _unprepared(tb) or found
            function = _function(tb)
            if function is not None:
                phase = _PHASES[code.co_name]
                at = Place(code.co_filename, tb.tb_lineno, code.co_qualname) if is_users(code) else None
                name, wrapped = function
                found = FunctionFailed(at=at, function=name, phase=phase, wrapped=wrapped)
        if found is not None:
            self._session.stream.emit(
                FunctionFailed,
                at=found.at,
                function=found.function,
                phase=found.phase,
                recomputing=found.recomputing,
                wrapped=found.wrapped,
            )


def _unprepared(tb: TracebackType) -> FunctionFailed | None:
    """`custom_bwd` runs on a function; told, should it raise itself, at the definition of that backward."""
    args = tb.tb_frame.f_locals.get("args") or (None,)
    owner = getattr(args[0], "_forward_cls", None)
    code = getattr(inspect.unwrap(owner.backward), "__code__", None) if owner is not None else None
    if owner is None or code is None:
        return None
    at = Place(code.co_filename, code.co_firstlineno, code.co_qualname) if is_users(code) else None
    return FunctionFailed(at=at, function=owner.__name__, phase="backward", wrapped=hasattr(args[0], _USED))


def _frames(tb: TracebackType | None) -> list[TracebackType]:
    out = []
    while tb is not None:
        out.append(tb)
        tb = tb.tb_next
    return out


def _function(tb: TracebackType) -> tuple[str, bool] | None:
    """The custom function whose forward or backward this frame is, and whether it is wrapped for autocast."""
    frame = tb.tb_frame
    code = frame.f_code
    if code.co_name not in _PHASES:
        return None
    ctx: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    if isinstance(ctx, FunctionCtx):
        owner = getattr(ctx, "_forward_cls", None)
        name = getattr(owner, "__name__", "") or type(ctx).__name__.removesuffix("Backward")
        return name, hasattr(ctx, _USED)
    back = frame.f_back  # `forward` without ctx: called by `apply` of its class
    for _ in range(6):
        if back is None:
            return None
        cls = back.f_locals.get("cls")
        if back.f_code.co_name == "apply" and isinstance(cls, type) and issubclass(cls, Function):
            return cls.__name__, False
        back = back.f_back
    return None
