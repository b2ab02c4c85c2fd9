"""What was seen beside a verdict, a line each."""

from __future__ import annotations

from halfstep.probe.runs.case import attempted
from halfstep.probe.runs.pair import Account
from halfstep.probe.runs.parting import Parting, Sameness


def notes_of(own: Account, fp32: Account, same: Sameness, parted: Parting | None) -> list[str]:
    """What was seen beside, worth a line each."""
    notes = []
    skipped = [p.attempted for p in own.points if p.outcome == "skipped"]
    if skipped:
        when = f"update {skipped[0]}" if len(skipped) == 1 else f"updates {skipped[0]} to {skipped[-1]}"
        others = sum(p.outcome == "skipped" for p in fp32.points) or "none"
        notes.append(f"as it is {len(skipped)} of {len(own.points)} updates were skipped ({when}), {others} in FP32")
    if same.data is not None and parted is not None and same.data > parted.update:
        notes.append(f"from update {same.data} on the data differ: they follow from what came before")
    if same.random is not None and (parted is None or same.random > parted.update):
        notes.append(f"from update {same.random} on they drew other random numbers")
    ended = own.end is not None and fp32.end is not None and own.raised is None and fp32.raised is None
    if ended and attempted(own) != attempted(fp32):
        notes.append(f"{attempted(own)} updates were attempted as it is, {attempted(fp32)} in FP32")
    left = ", ".join(fp32.halves)
    if left:
        some = f", {fp32.half_parameters} parameter tensors" if fp32.half_parameters else ""
        notes.append(f"not all of the FP32 run was FP32: {left} was still seen in it{some}")
    if fp32.end is not None and fp32.end.get("undone"):
        counts = sorted(fp32.end["undone"].items())
        undone = ", ".join(f"{n:,} {what.removesuffix('s') if n == 1 else what}" for what, n in counts if n)
        notes.append(f"undone for FP32: {undone}")
    return notes
