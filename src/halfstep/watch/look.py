"""A look: for a while, every operator is seen as it runs, with the user's line and its real tensors.

Calls tell what a script asked of torch; a look tells what it did by hand (weights decayed, averages kept, gradients
scaled or measured) and with which numbers (which operator overflowed). It costs some ten microseconds an operator, so
looks are rationed by a count of operators: the first updates of a run, then updates 2^k, and whenever something went
wrong. What is compiled does not show its operators, so a script that compiles is not looked at.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from halfstep.events import Place

if TYPE_CHECKING:
    from halfstep.watch.session import Session

BUDGET = 12_000  # operators seen before looks are limited to updates 2^k
_ITEM = torch.ops.aten._local_scalar_dense.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ELEMENTS = 1 << 16  # so many elements count as one operator more


@functools.cache
def _about(func: Any) -> tuple[str, bool]:
    """Name and mutability of an operator overload; every lens asks, so they are kept."""
    return str(func._schema.name).split("::")[-1], bool(func._schema.is_mutable)


class Operation:
    """One operator call: what ran on which tensors. The line is found when somebody asks for it."""

    __slots__ = ("_at", "_place", "args", "backward", "func", "kwargs", "out")

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], backward: bool, place: Callable[[], Place | None]
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.out: Any = None
        self.backward = backward
        self._place = place
        self._at: Place | None = None

    @property
    def name(self) -> str:
        """The operator's name without overload: "mul_", "addmm"."""
        return _about(self.func)[0]

    @property
    def mutates(self) -> bool:
        return _about(self.func)[1]

    @property
    def at(self) -> Place | None:
        if self._at is None:
            self._at = self._place()
        return self._at

    def tensors(self) -> list[torch.Tensor]:
        """The tensor arguments, lists of tensors included, in order."""
        out: list[torch.Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor):
                out.append(value)
            elif isinstance(value, (list, tuple)):
                out.extend(v for v in value if isinstance(v, torch.Tensor))
        return out


class Lens(Protocol):
    """What is looked for. ``before`` is called for operators that write to an argument, ``after`` for all."""

    def before(self, operation: Operation) -> None: ...

    def after(self, operation: Operation) -> None: ...


class Look:
    """Opens and closes looks; holds the lenses.

    `open` and `close` are called between updates, from the thread that trains: only the thread that opened a look is
    seen by it. While halfstep computes for itself, `silent` keeps its own operators out of sight.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.lenses: list[Lens] = []
        self.watchers: list[Callable[[bool], None]] = []  # told when a look opens and when it closes
        self.spent = 0
        self.forbidden: str | None = None  # why no look is taken
        self._backward = False
        self._mode: _Mode | None = None
        self._updates = 0
        self._wanted = 0

    @property
    def is_open(self) -> bool:
        """Whether the operators of this thread are seen now."""
        mode = self._mode
        return mode is not None and not mode.blind and mode.thread == threading.get_ident()

    @property
    def updates(self) -> int:
        """Updates attempted so far."""
        return self._updates

    @property
    def wanted(self) -> bool:
        """Whether something went wrong lately."""
        return self._wanted > 0

    @property
    def backward(self) -> bool:
        """Whether the thread that is looked at is inside a backward."""
        return self._backward

    @backward.setter
    def backward(self, value: bool) -> None:
        if self._mode is None or self._mode.thread == threading.get_ident():
            self._backward = value

    @property
    def alone(self) -> bool:
        """Whether no other mode is on in this thread: no compiler traces, no tensors are fake."""
        ours = self._mode is not None and self._mode.thread == threading.get_ident()
        return torch._C._len_torch_dispatch_stack() == int(ours)

    def open(self) -> None:
        if self._mode is not None:
            self.close()  # a blind one: perhaps it can be taken off by now
        if self._mode is None and self.forbidden is None and self.lenses and _get_current_dispatch_mode() is None:
            # Never on top of somebody else's mode: that one, on leaving, takes off whatever lies on top.
            self._mode = _Mode(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            for watcher in self.watchers:
                watcher(True)

    def close(self) -> None:
        mode = self._mode
        if mode is None:
            return
        if mode.thread == threading.get_ident() and _get_current_dispatch_mode() is mode:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._mode = None
        elif mode.blind:
            return
        else:  # another thread's, or under somebody else's mode: it stays, blind, until it can be taken off
            mode.blind = True
        for watcher in self.watchers:
            watcher(False)

    def want(self, updates: int = 3) -> None:
        """Something went wrong: look at the next few updates."""
        self._wanted = max(self._wanted, updates)

    def forbid(self, why: str) -> None:
        self.forbidden = self.forbidden or why
        self.close()

    def update_ended(self) -> None:
        """Between two updates: decide whether the next one is looked at."""
        self._updates += 1
        number = self._updates + 1
        due = self.spent < BUDGET or number & (number - 1) == 0 or self._wanted > 0
        self._wanted = max(0, self._wanted - 1)
        if due and self.is_open:
            return
        if due and self.forbidden is None:
            self.open()
        else:
            self.close()

    def silent(self) -> _Silence:
        mode = self._mode
        return _Silence(mode if mode is not None and mode.thread == threading.get_ident() else None)


class _Silence(AbstractContextManager[None]):
    """A region in which the open look sees nothing."""

    __slots__ = ("_mode", "_was")

    def __init__(self, mode: _Mode | None) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        if self._mode is not None:
            self._was = self._mode.live
            self._mode.live = False

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            self._mode.live = self._was


def _written(operation: Operation) -> list[torch.Tensor]:
    """The tensors of the lists that this operator writes to."""
    schema = operation.func._schema.arguments
    return [
        tensor
        for argument, value in zip(schema, operation.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, (list, tuple))
        for tensor in value
        if isinstance(tensor, torch.Tensor)
    ]


def _empty(tensor: torch.Tensor) -> bool:
    """Whether there is no memory behind a tensor: on the meta device, zeros that forward differentiation assumes."""
    return tensor.is_meta or tensor._is_zerotensor()


@functools.cache
def _is_collective(func: Any) -> bool:
    return bool(func.namespace in ("c10d", "_c10d_functional"))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look
        self.live = True
        self.blind = False  # for good: it lies where it cannot be taken off
        self.thread = threading.get_ident()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what was compiled before anybody could know runs as ever, and its operators are not seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_collective(func):
            return func(*args, **kwargs)
        strange = any(t not in _PLAIN for t in types) or any(isinstance(a, torch.Tensor) and _empty(a) for a in args)
        if not self.live or self.blind or strange:
            if func is _ITEM and not isinstance(args[0], torch.Tensor):
                return args[0]  # a number that torch wrapped in a tensor (`loss / 4`) arrives here bare
            return func(*args, **kwargs)
        look = self._look
        look.spent += 1
        operation = Operation(func, args, kwargs, look.backward, look._session.place)
        versions: list[tuple[torch.Tensor, int]] = []
        if operation.mutates:
            self._tell("before", operation)
            if operation.name.startswith("_foreach"):
                versions = [(t, t._version) for t in _written(operation) if not t.is_inference()]
        operation.out = out = func(*args, **kwargs)
        for tensor, version in versions:
            if tensor._version == version:  # inside a mode, tensors of a list keep their counters; outside they rise
                torch.autograd.graph.increment_version(tensor)
        if isinstance(out, torch.Tensor):
            if type(out) not in _PLAIN or _empty(out):
                return out  # nothing is computed: another mode makes fake tensors, say
            look.spent += out.numel() // _ELEMENTS
        self._tell("after", operation)
        return out

    def _tell(self, when: str, operation: Operation) -> None:
        self.live = False
        try:
            with self._look._session.patches.lock:
                for lens in self._look.lenses:
                    getattr(lens, when)(operation)
        except Exception as error:
            self._look._session.fault(f"looking {when} {operation.name}", error)
        finally:
            self.live = True
