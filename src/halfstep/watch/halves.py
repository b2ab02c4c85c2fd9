"""Half precision: parameters that are themselves half, where they became so, and how many operators computed in it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import HalfParameters, Place
from halfstep.watch.look import Operation
from halfstep.watch.patches import Patches

if TYPE_CHECKING:
    from halfstep.watch.session import Session

HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_MOVES = frozenset(("_to_copy", "copy_", "detach", "view", "t", "clone", "alias", "lift_fresh", "empty", "zeros_like"))
_ASKED = 16  # attempts whose parameters are looked through, then one in so many


class Halves:
    """Remembers the line at which each parameter became half; counts half operators while a look is open."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._origins: dict[int, tuple[weakref.ref[Any], Place | None, str]] = {}  # id(parameter) -> it, where, name
        self._told: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()

    def install(self, patches: Patches) -> None:
        for name in ("half", "bfloat16", "to", "type"):
            patches.around(torch.nn.Module, name, None, self._after_cast)
        patches.around(torch.nn.Module, "register_parameter", None, self._after_register)
        self._session.look.lenses.append(self)

    # -- where parameters became half ----------------------------------------------------------------------------

    def _after_cast(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at: Place | None = None
        for name, parameter in args[0].named_parameters():
            if parameter.dtype in HALF and not self._knows(parameter):
                at = at or self._session.place()
                self._note(parameter, at, name)

    def _after_register(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameter = kwargs.get("param", args[2] if len(args) > 2 else None)
        if isinstance(parameter, torch.Tensor) and parameter.dtype in HALF and not self._knows(parameter):
            self._note(parameter, self._session.place(), str(kwargs.get("name", args[1] if len(args) > 1 else "")))

    def _knows(self, parameter: torch.Tensor) -> bool:
        known = self._origins.get(id(parameter))
        return known is not None and known[0]() is parameter

    def _note(self, parameter: torch.Tensor, at: Place | None, name: str) -> None:
        self._origins[id(parameter)] = (weakref.ref(parameter), at, name)

    def origin(self, parameter: torch.Tensor) -> tuple[Place | None, str | None]:
        """Where this parameter became half and what its module calls it; (None, None) where nobody saw it."""
        known = self._origins.get(id(parameter))
        return (known[1], known[2]) if known is not None and known[0]() is parameter else (None, None)

    def about_to_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell, once an optimizer, that parameters with a gradient are half (called before its first updates)."""
        ident = self._session.ledger.ident(optimizer)
        self._asked[ident] += 1
        if ident in self._told or (self._asked[ident] > _ASKED and self._asked[ident] % _ASKED):
            return
        half = [p for g in optimizer.param_groups for p in g["params"] if p.dtype in HALF and p.grad is not None]
        if not half:
            return
        self._told.add(ident)
        at, name = self.origin(half[0])
        self._session.stream.emit(
            HalfParameters,
            at=at,
            optimizer=ident,
            dtypes=dict(Counter(HALF[p.dtype] for p in half)),
            name=name,
            used_at=self._session.place(),
        )

    # -- operators -----------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None:
        pass

    def after(self, operation: Operation) -> None:
        out = operation.out
        if isinstance(out, (list, tuple)):
            out = next((v for v in out if isinstance(v, torch.Tensor)), None)
        if not isinstance(out, torch.Tensor):
            return
        half = HALF.get(out.dtype)
        if half is not None and operation.name not in _MOVES:
            self._counts[half] += 1

    def taken(self) -> dict[str, int] | None:
        """Half dtype -> operators seen in it since the last call; None where nobody was looking."""
        counts, self._counts = self._counts, Counter()
        return dict(counts) if self._session.look.is_open else None
