"""Who made the first non-finite value that mattered, forward or backward, and why.

After a backward that was looked at, the search starts at what mattered, the loss or a gradient, and follows non-finite
inputs upwards (see `provenance`) to the operator whose own inputs were finite: so masks filled with -inf and memory
nobody read name nobody. An overflow that a later operator hid matters where FP32 would have given that operator's
output another value (see `silence`). The line of a gradient operator is that of its forward operator.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import NonFinite, Place
from halfstep.watch.gradients import Gradients
from halfstep.watch.notes import Notes
from halfstep.watch.patches import Patches
from halfstep.watch.paths import Paths
from halfstep.watch.positions import Positions
from halfstep.watch.provenance import Origin, Provenance
from halfstep.watch.ranges import HALF, MEASURED, address
from halfstep.watch.silence import Silence
from halfstep.watch.totals import Totals
from halfstep.watch.twins import Twins

if TYPE_CHECKING:
    from halfstep.watch.session import Session

MOVES = frozenset(
    (
        *("_to_copy", "copy_", "clone", "index", "index_select", "gather", "stack", "cat", "embedding"),
        *("where", "fill_", "masked_fill", "masked_fill_", "index_put_", "slice_scatter", "select_scatter"),
        *("repeat", "roll", "flip", "take", "constant_pad_nd", "masked_select", "full", "full_like"),
        *("scalar_tensor", "leaf", "argument"),
    )
)
_REDUCTIONS = frozenset(
    (
        *("sum", "mean", "nansum", "var", "std", "var_mean", "norm", "linalg_vector_norm", "cumsum", "logsumexp"),
        *("dot", "trace", "logcumsumexp"),
    )
)
_LOGS = frozenset(("log", "log2", "log10", "log1p", "logit", "div", "reciprocal", "special_xlogy", "xlogy"))
_WRITES = frozenset(("index_put_", "copy_", "fill_"))
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e\+?\d+)?", re.IGNORECASE)
_MASKS = frozenset(("log", "log2", "log10"))
_NEAR = 6  # generations up in which the reason for a zero is looked for


class Culprit:
    """``only_culprits``: nothing is measured beside (see `trouble`)."""

    def __init__(self, session: Session, gradients: Gradients, *, only_culprits: bool = False) -> None:
        self._session = session
        self.paths = Paths(session)
        self.provenance = Provenance(session, self.paths, gradients)
        self.silence = Silence(session, self.provenance)
        self.notes = Notes(session, self.provenance)
        self.twins = Twins(session, self.provenance)
        others = (self.twins, Positions(session, self.provenance), Totals(session, gradients, self.provenance))
        self._others = () if only_culprits else others

    def install(self, patches: Patches) -> None:
        if self.provenance in self._session.look.lenses:
            return
        self.paths.entries.append(self.provenance)
        for part in (self.paths, self.provenance, self.silence, self.notes, *self._others):
            part.install(patches)

    def remove(self) -> None:
        self.paths.remove()

    def forget(self) -> None:
        """Nothing that was seen has to do with what comes."""
        self.provenance.cut()
        self.provenance.cut()
        self.silence.clear()

    def line(self, node: Any) -> Place | None:
        """The line of the forward operator that this autograd node belongs to, where it was looked at."""
        known = self.provenance.line(node)
        return None if known is None else known.at

    def trace(
        self, roots: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor], scale: torch.Tensor | None = None
    ) -> None:
        """Emit who made the non-finite value that reached the loss or a gradient, if one did; forget the rest.

        ``scale``: the loss scale that the roots carry.
        """
        try:
            self.notes.tell()
            self.twins.tell(scale, self._names())
            ends = [o for o in map(self.provenance.of, roots) if o is not None]
            reached = "loss"
            bad = [o for o in ends if not o.finite]
            counts = {}
            if not bad:
                reached = "gradient"
                leaves = {id(v.grad): v.grad for v in self.provenance.received.values() if v.grad is not None}
                arrived = list(({id(g): g for g in gradients} | leaves).values())
                bad = [o for o in map(self.provenance.of, arrived) if o is not None and not o.finite]
                counts = {"spoiled": len(bad), "gradients": len(arrived)}
            if bad:
                first = min(sources(bad), key=lambda o: o.number)
                self._tell(first, reached, None if scale is None else float(scale), **counts)
            else:
                self._tell_silent(ends)
        finally:
            self.provenance.cut()
            self.silence.clear()

    # -- what happened -------------------------------------------------------------------------------------------

    def _tell_silent(self, ends: list[Origin]) -> None:
        """An overflow that a later operator hid, where what that one made of it went into the loss."""
        ruined = self.silence.ruined()
        above = _ancestors(ends) if ruined else set()
        for ruin in ruined:
            if id(ruin.reached) in above:
                self._tell(ruin.cause, "output", None, absorbed=ruin.hidden_by.name, share=ruin.share)
                return

    def _tell(self, origin: Origin, reached: str, scale: float | None, **more: Any) -> None:
        if origin.facts.get("told"):
            return  # it went on from there, through parameters or a state that is carried
        origin.facts["told"] = True
        cause, at, fields = self._reason(origin)
        if cause == "carried":
            return
        limit = torch.finfo(origin.dtype).max if origin.dtype in MEASURED else None
        self._session.stream.emit(
            NonFinite,
            at=at,
            operator="input" if origin.name in ("leaf", "argument") else origin.name,
            phase="forward" if origin.node is None else "backward",
            node=origin.node,
            value="nan" if origin.nan else "inf",
            dtype=str(origin.dtype).removeprefix("torch."),
            peak=origin.facts.get("peak"),
            limit=limit,
            exact=origin.facts.get("exact"),
            module=origin.path,
            reached=reached,
            scale=scale,
            cause=cause,
            in_optimizer="busy" in origin.facts,
            **{**fields, **more},
        )

    def _reason(self, origin: Origin) -> tuple[str, Place | None, dict[str, Any]]:
        """Why this operator made it: the cause's name, the line to be named, and its numbers."""
        facts = origin.facts
        put = _moved_only(origin) and not origin.grad and origin.path is None
        if put or origin.number <= self.provenance.start or origin.name in ("leaf", "argument"):
            return self._from_before(origin)
        if "masked" in facts and origin.nan:
            return self._masked(origin)
        near = list(origin.upstream(_NEAR))
        masked = next((o for o in near if "masked" in o.facts), None)
        if masked is not None and origin.nan and facts.get("born_of_inf"):
            return self._masked(masked)
        if "constant" in facts and origin.node is None:
            return "constant", origin.at, {"constant": facts["constant"]}
        epsilon = next((o for o in near if "epsilon" in o.facts), None)
        if epsilon is not None and not _is_overflow(origin):
            return "epsilon", epsilon.at, {"constant": epsilon.facts["epsilon"], "hint": str(epsilon.dtype)[6:]}
        rounded = next((o for o in near if "saturated" in o.facts), None)
        if rounded is not None and (origin.name in _LOGS or origin.node is not None) and not _is_overflow(origin):
            return "probability", origin.at, {"hint": rounded.name, "count": rounded.facts["saturated"]}
        if facts.get("empty"):
            return "nothing", origin.at, {}
        if origin.node is None and origin.path is None and not origin.grad and _is_fed(origin):
            return "input", facts.get("used_at", origin.at), {"hint": origin.name}
        reduces = (origin.name in _REDUCTIONS or "summed" in facts) and origin.dtype in HALF and origin.node is None
        if reduces and not origin.nan and _is_overflow(origin):
            return "reduction", origin.at, {}
        return "operator", origin.at, {}

    def _masked(self, origin: Origin) -> tuple[str, Place | None, dict[str, Any]]:
        """Rows of a softmax were masked: by an infinity that was meant, or by a number that became one?"""
        for above in origin.upstream(_NEAR):
            number = written_number(above) if above.name in _WRITES and above.dtype in HALF else None
            if number is not None:
                return "constant", above.at, {"constant": number}
        return "masked", origin.at, {"count": origin.facts["masked"][0], "of": origin.facts["masked"][1]}

    def _from_before(self, origin: Origin) -> tuple[str, Place | None, dict[str, Any]]:
        facts = origin.facts
        fields = {"count": facts.get("wrong"), "of": facts.get("elements")}
        parameter = self._parameter(origin.key)
        if parameter is not None:
            return "parameter", origin.at, {"hint": parameter, **fields}
        if "busy" in facts:
            return "carried", origin.at, {}
        if origin.name in ("leaf", "argument"):
            return "input", facts.get("used_at", origin.at), {"hint": _counted(facts), **fields}
        if origin.grad or origin.path is not None or origin.node is not None or "busy" in facts:
            return "carried", origin.at, {}
        return "input", facts.get("used_at", origin.at), {"hint": origin.name}

    def _names(self) -> dict[int, str]:
        """Names of parameters, by id."""
        return {
            id(parameter): f"{self.paths.name(root)}.{name}"
            for root in self.paths.roots()
            for name, parameter in root.named_parameters()
        }

    def _parameter(self, key: int) -> str | None:
        """The name of the parameter in this storage."""
        for root in self.paths.roots():
            for name, parameter in root.named_parameters():
                if address(parameter) == key:
                    return f"{self.paths.name(root)}.{name}"
        for _, optimizer in self._session.ledger.optimizers():
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if address(parameter) == key:
                        return f"parameter {index}"
        return None


def sources(ends: Iterable[Origin]) -> list[Origin]:
    """The origins of what is not finite in ``ends``: those whose own inputs were finite."""
    found: dict[int, Origin] = {}
    seen: set[int] = set()
    queue = [(end, end) for end in ends]  # with the operator that used it, moves of data left out
    while queue:
        origin, user = queue.pop()
        if id(origin) in seen:
            continue
        seen.add(id(origin))
        if not origin.bad:
            found[id(origin)] = origin
            if _moved_only(origin) and origin.name != "argument":
                origin.facts["used_at"] = user.at
            continue
        causes: Sequence[Origin] = origin.bad
        if origin.nan:
            causes = [o for o in origin.bad if o.nan]
            if not causes:  # NaN of infinities: were those meant?
                causes = [o for o in sources(origin.bad) if not _is_meant(o)]
                if not causes:
                    origin.facts["born_of_inf"] = True
                    found[id(origin)] = origin
                    continue
        if origin.name == "argument" and all(_moved_only(o) for o in sources(causes)):
            found[id(origin)] = origin
            continue
        queue.extend((cause, user if origin.name in MOVES else origin) for cause in causes)
    return list(found.values())


def written_number(origin: Origin) -> float | None:
    """The number that the script wrote here and that became infinite on its way into half precision.

    What was written is known to be infinite; the line itself is asked only for the number it was.
    """
    line = linecache.getline(origin.at.file, origin.at.line) if origin.at is not None else ""
    if not line or "inf" in line.lower():
        return None
    limit = torch.finfo(origin.dtype).max
    numbers = [float(n) for n in _NUMBER.findall(line)]
    return next((-n for n in numbers if n > limit), None)


def _is_meant(origin: Origin) -> bool:
    """An infinity put there on purpose: a fill with -inf, a mask of 0 and -inf or the logarithm of one."""
    if origin.facts.get("meant") or math.isinf(origin.facts.get("filled", 0.0)):
        return True
    made = origin.name in ("leaf", "argument") or (origin.name in _MASKS and not origin.grad)
    return made and not origin.nan and origin.high in (0.0, -math.inf)


def _moved_only(origin: Origin) -> bool:
    return origin.name in MOVES and "exact" not in origin.facts


def _is_fed(origin: Origin) -> bool:
    """Computed before any module ran and without a graph: part of making the micro-batch."""
    return not any(o.grad or o.path is not None for o in origin.upstream(_NEAR))


def _is_overflow(origin: Origin) -> bool:
    """FP32 has room for what half precision has not."""
    exact = origin.facts.get("exact")
    return exact is not None and math.isfinite(exact)


def _ancestors(ends: Iterable[Origin]) -> set[int]:
    seen: set[int] = set()
    queue = list(ends)
    while queue:
        origin = queue.pop()
        if id(origin) not in seen:
            seen.add(id(origin))
            queue.extend(origin.inputs)
    return seen


def _counted(facts: dict[str, Any]) -> str:
    """ "3 NaN in 2 of 20 rows, columns 5 and 8" """
    kind = "NaN" if facts.get("nans") == facts.get("wrong") else "infinite" if not facts.get("nans") else "NaN or inf"
    words = f"{facts.get('wrong', 0)} {kind} of {facts.get('elements', 0)} elements"
    if "rows" in facts:
        words += f" in {facts['rows']} of {facts['of_rows']} rows (the first is row {facts['first_row']})"
    columns = facts.get("columns", ())
    if columns and facts["of_columns"] <= len(columns):
        words += f", column{'s' if len(columns) > 1 else ''} {' and '.join(map(str, columns))}"
    if "argument" in facts:
        words = f"argument {facts['argument']} of {facts['module']}: {words}"
    return words
