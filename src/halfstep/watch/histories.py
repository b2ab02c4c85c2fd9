"""Histories: graphs of earlier contributions that something keeps alive, and the variable that does.

Each backward's root node gets a token; it lives as long as the node. Tokens of contributions made several updates ago
should be gone. Tensors that carry a graph but were never a root (predictions, validation losses) are counted in a few
passes over the collector's objects: two early ones, then as many as a small share of the run's time allows.
"""

from __future__ import annotations

import collections
import gc
import itertools
import operator
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import GraphsKept, Place
from halfstep.watch.parameters import Parameters
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users
from halfstep.watch.sources import growth

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_TOKEN = "halfstep.root"
_KEPT = 512  # roots remembered
_OFTEN, _SELDOM, _DENSE = 4, 64, 64  # attempts between two counts of living tokens: at first, later, until when
_FIRST, _SECOND = 8, 24  # attempts after which tensors are counted in any case
_SHARE = 0.003  # of the run's time that later counts may take
_ALIVE = 6  # earlier updates whose graphs live: more than any recurrence holds
_OLD = 8  # living tensors with graphs of earlier updates
_GREW = 3
_NODES = 20_000  # of a graph walked through in search of old roots
_NEAR = 64  # of its nodes looked at to tell whether a tensor continues an earlier one
_TENSORS = 2000
_DEEP = 3  # containers in containers

_sequence = getattr(torch._C._autograd, "_get_sequence_nr", None)


class _Token:
    __slots__ = ("__weakref__", "attempt")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt


class Histories:
    def __init__(self, session: Session, parameters: Parameters) -> None:
        self._session = session
        self._roots: collections.deque[weakref.ref[_Token]] = collections.deque(maxlen=_KEPT)
        self._attempts = 0
        self._before = 0  # earlier updates whose graphs lived, at the last count
        self._tensors: int | None = None  # living tensors with old graphs, at the last count
        self._began = time.perf_counter()
        self._next = _FIRST  # the attempt after which tensors are counted next
        self._found = 0
        self._marks: collections.deque[int] = collections.deque(maxlen=3)  # sequence numbers at the last attempts
        parameters.witnesses.append(self)

    def install(self, patches: Patches) -> None:
        patches.around(torch.autograd, "backward", self._before_backward)

    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = kwargs.get("tensors", args[0] if args else None)
        for root in (value,) if isinstance(value, torch.Tensor) else value or ():
            node: Any = root.grad_fn if isinstance(root, torch.Tensor) else None  # a graph's edge may be a root too
            if node is not None:
                token = _Token(self._attempts)
                node.metadata.setdefault(_TOKEN, token)
                self._roots.append(weakref.ref(token))

    # -- after attempts ------------------------------------------------------------------------------------------

    def before(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        pass

    def after(self, optimizer: torch.optim.Optimizer, ident: int, number: int) -> None:
        self._attempts += 1
        number = self._attempts
        if _sequence is not None:
            self._marks.append(_sequence())
        alive = 0
        if number % (_OFTEN if number <= _DENSE else _SELDOM) == 0:
            alive = len(self._living())
            grew, self._before = alive - self._before, alive
            alive = alive if alive >= _ALIVE and grew >= _GREW else 0
        if number < self._next and not (alive and number >= 2 * self._found):
            return
        if len(self._marks) == self._marks.maxlen:
            self._look_for(alive, number >= self._next)

    def _living(self) -> set[int]:
        """The earlier updates (not the last two) of whose graphs a root lives."""
        tokens = [ref() for ref in self._roots]
        return {t.attempt for t in tokens if t is not None and t.attempt < self._attempts - 2}

    def _look_for(self, alive: int, scan: bool) -> None:
        began = time.perf_counter()
        old = [t for t in itertools.islice(_graph_tensors(), _TENSORS) if self._is_old(t)]
        grew = 0
        if scan:
            before, self._tensors = self._tensors, len(old)
            grew = 0 if before is None else len(old) - before
            self._plan(time.perf_counter() - began)
        many = len(old) >= _OLD and grew >= _GREW
        if not alive and not many:
            return
        holders = [t for t in old if not alive or self._holds_roots(t)] or old
        holder, at = _holder(holders)
        if holder is None and not alive:
            return
        at = at or self._session.place()
        self._found = self._attempts
        self._session.stream.emit(
            GraphsKept,
            at=at,
            graphs=alive,
            asked=self._attempts,
            tensors=len(old),
            growth=float(grew),
            holder=holder,
        )

    def _plan(self, cost: float) -> None:
        """When to look again: at twice the attempts, or later, if that would cost more than its share of the time."""
        pace = (time.perf_counter() - self._began) / self._attempts
        paid = 0 if self._attempts < _SECOND else int(cost / _SHARE / max(pace, 1e-9))
        self._next = max(_SECOND if self._attempts < _SECOND else 2 * self._attempts, self._attempts + paid)

    def _is_old(self, tensor: torch.Tensor) -> bool:
        node: Any = None if tensor._is_view() else tensor.grad_fn
        if node is None:
            return False
        tokens = _tokens(node, _NEAR)
        return node._sequence_nr() < self._marks[0] or any(t.attempt < self._attempts - 2 for t in tokens)

    def _holds_roots(self, tensor: torch.Tensor) -> bool:
        return any(t.attempt < self._attempts - 2 for t in _tokens(tensor.grad_fn, _NODES))


def _graph_tensors() -> Iterator[torch.Tensor]:
    """All living tensors that carry a graph."""
    things = gc.get_objects()
    plain = map(operator.is_, map(type, things), itertools.repeat(torch.Tensor))
    for tensor in itertools.compress(things, plain):
        if tensor.requires_grad and not tensor.is_leaf:
            yield tensor


def _tokens(node: Any, limit: int) -> Iterator[_Token]:
    """The tokens in the graph below a node."""
    seen = {node}
    queue = collections.deque([node])
    while queue and len(seen) < limit:
        node = queue.popleft()
        token = node.metadata.get(_TOKEN)
        if isinstance(token, _Token):
            yield token
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def _holder(tensors: Iterable[torch.Tensor]) -> tuple[str | None, Place | None]:
    """The variable that holds most of these tensors, and the line where it grows."""
    wanted = {id(t) for t in tensors}
    best: tuple[int, str, str] | None = None
    for name, value, file in _variables():
        count = _count(value, wanted, _DEEP)
        if count and (best is None or count > best[0]):
            best = (count, name, file)
    if best is None:
        return None, None
    _, name, file = best
    line = growth(file, name.split(".")[-1])
    return name, None if line is None else Place(file, line)


def _variables() -> Iterator[tuple[str, Any, str]]:
    """The user's variables: locals and globals of the functions that run, attributes of objects among them."""
    frame: FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        if is_users(frame.f_code):
            spaces: list[Mapping[str, Any]] = [frame.f_locals]
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                spaces.append(frame.f_globals)
            for space in spaces:
                for name, value in list(space.items()):
                    yield name, value, frame.f_code.co_filename
                    if id(value) not in seen and _is_users_object(value):
                        seen.add(id(value))
                        for key, inner in list(vars(value).items()):
                            yield f"{name}.{key}", inner, _file_of(value) or frame.f_code.co_filename
        frame = frame.f_back


def _is_users_object(value: Any) -> bool:
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(("torch", "builtins", "halfstep"))


def _file_of(value: Any) -> str | None:
    return getattr(sys.modules.get(type(value).__module__), "__file__", None)


def _count(value: Any, wanted: set[int], depth: int) -> int:
    """How many of the wanted tensors this value is, or holds."""
    if id(value) in wanted:
        return 1
    if depth == 0:
        return 0
    if isinstance(value, dict):
        return sum(_count(v, wanted, depth - 1) for v in list(value.values())[:_KEPT])
    if isinstance(value, (list, tuple, set, collections.deque)):
        return sum(_count(v, wanted, depth - 1) for v in list(value)[-_KEPT:])
    return 0
