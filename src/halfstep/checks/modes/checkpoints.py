"""Activation checkpointing: whether backward computed again what the first forward computed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import Event, Finding, Place, Raised, Recomputed

_APART = 0.05  # relative difference of recomputed values that rounding and the order of sums never make
_DRAWN = 5e-3  # where random numbers are known to have been drawn outside what is put back
_OWN_SOURCES = frozenset(("generator", "python", "numpy"))
_METADATA = re.compile(r"saved metadata: \{.*?torch\.(\w+).*?recomputed metadata: \{.*?torch\.(\w+)", re.DOTALL)
_COUNTS = ("different number of tensors", "more tensors during recomputation")


class CheckpointsAgree(BaseCheck):
    """A recomputation in another dtype, or with other random numbers, gives the gradient of another forward."""

    rules = ("checkpoint-loses-autocast", "checkpoint-changes-randomness")

    def __init__(self) -> None:
        self._last: Recomputed | None = None

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case Recomputed():
                self._last = event
                if event.again_dtype or (event.autocast != event.again_autocast and (event.difference or 0.0) > 0.0):
                    yield self._loses(event, event.at)
                elif self._changed(event):
                    yield self._randomness(event)
            case Raised(type="CheckpointError"):
                yield from self._refused(event)
            case _:
                pass

    def _changed(self, event: Recomputed) -> bool:
        apart = event.difference
        if event.by not in ("checkpoint", "reentrant") and not event.drew:
            return False  # a custom function may differentiate something else than its forward
        if event.changed:
            return True
        return apart is not None and apart > (_DRAWN if _unkept(event) else _APART)

    # -- findings ------------------------------------------------------------------------------------------------

    def _loses(self, event: Recomputed, at: Place | None) -> Finding:
        if event.again_dtype:
            seen = f"the first forward computed {event.dtype} where the recomputation computed {event.again_dtype}"
        else:
            seen = (
                f"the first forward ran with autocast {_told(event.autocast)}, the recomputation with autocast "
                f"{_told(event.again_autocast)}: its values differ by {event.difference or 0.0:.1g} of their size"
            )
        torchs = event.by in ("checkpoint", "reentrant")
        return Finding(
            rule="checkpoint-loses-autocast",
            severity="error",
            at=at,
            message=f"{seen}; the gradient belongs to another forward",
            evidence={
                "dtype": event.dtype or None,
                "recomputed_dtype": event.again_dtype or None,
                "autocast": event.autocast,
                "recomputed_autocast": event.again_autocast,
                "difference": event.difference,
            },
            phase="backward",
            fix=(
                "enter autocast inside the checkpointed function the same way in both passes"
                if torchs
                else "keep torch.get_autocast_dtype(device) and torch.is_autocast_enabled(device) in forward, enter "
                "torch.autocast with them in backward; or use torch.utils.checkpoint"
            ),
        )

    def _randomness(self, event: Recomputed) -> Finding:
        own = next((s for s in ("generator", "python", "numpy") if s in event.drew), None)
        at = event.at
        if event.preserves is False and "default" in event.drew:
            why = "its random state is not put back (preserve_rng_state=False)"
            fix = "leave preserve_rng_state at True"
        elif own == "generator":
            why = "it draws from a generator of its own, whose state nobody puts back"
            fix = "draw outside the checkpointed function and pass the numbers in"
            at = event.drew_at or at
        elif own is not None:
            why = f"it draws from {own}'s random numbers, which are not put back"
            fix = "draw outside the checkpointed function and pass the numbers in"
        elif event.by not in ("checkpoint", "reentrant") and event.drew:
            why = f"{event.by} does not put the random state back"
            fix = "keep torch.get_rng_state() in forward and set it in backward; or use torch.utils.checkpoint"
        else:
            why = "it holds what changes from call to call (a counter, a generator of another library)"
            fix = "keep state that changes out of the checkpointed function: pass it in"
        if (event.difference or 0.0) > _DRAWN or not event.changed:
            seen = f"what backward computed again differs from the first forward by {event.difference:.2g} of its size"
        else:
            seen = f"backward ran the forward again with other numbers (in {event.changed.strip('_')})"
        return Finding(
            rule="checkpoint-changes-randomness",
            severity="error" if event.drew else "warning",
            at=at,
            message=f"{seen}: {why}; the gradient belongs to another forward",
            evidence={
                "difference": event.difference,
                "tensors": event.tensors,
                "operator": event.changed or None,
                "drew": list(event.drew),
                "preserve_rng_state": event.preserves,
            },
            phase="backward",
            fix=fix,
        )

    # -- torch's own refusal -------------------------------------------------------------------------------------

    def _refused(self, event: Raised) -> Iterable[Finding]:
        last = self._last
        at = event.at if last is None else last.at
        found = _METADATA.search(event.message)
        dtypes = found.groups() if found is not None else ("", "")
        if dtypes[0] != dtypes[1]:
            if last is None or not last.again_dtype:
                yield self._loses(Recomputed(by="checkpoint", dtype=dtypes[0], again_dtype=dtypes[1]), at)
        elif last is not None and last.autocast != last.again_autocast:
            yield self._loses(last, at)
        elif last is not None and _unkept(last) and not self._changed(last):
            words = (
                "another number of tensors" if any(c in event.message for c in _COUNTS) else "tensors of other shapes"
            )
            yield Finding(
                rule="checkpoint-changes-randomness",
                severity="error",
                at=last.drew_at or at,
                message=(
                    f"the recomputation saved {words} than the first forward: which way it goes depends on random "
                    f"numbers ({', '.join(last.drew)}) that are not put back"
                ),
                evidence={"drew": list(last.drew), "preserve_rng_state": last.preserves},
                phase="backward",
                fix="draw outside the checkpointed function and pass the numbers in",
            )


def _unkept(event: Recomputed) -> bool:
    """Whether the forward drew random numbers from a source whose state the recomputation does not find again."""
    return bool(_OWN_SOURCES & set(event.drew)) or ("default" in event.drew and event.preserves is False)


def _told(autocast: str) -> str:
    return autocast if autocast in ("off", "") else f"in {autocast}"
