"""The processes of one run as one: each one's findings told once, ranks compared, a single summary.

Each process that trained has left its events and, where it came to its end, its own verdict on them. One that was
killed is judged by what its file holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.checks.folding import fold
from halfstep.checks.judge import Judge, Summary, ranked
from halfstep.checks.registry import cross_checks
from halfstep.checks.replicas.ranks import NEEDED, compare
from halfstep.errors import RecordError
from halfstep.events import Ended, Event, Finding, GroupMade, Started, restored
from halfstep.record.history import History
from halfstep.record.reader import events, files, kind_of, lines, parsed, verdict

_DENSE = 4096  # updates of each rank that are compared one by one, then every _SPARSE-th
_SPARSE = 64
_ALWAYS = frozenset(("Attempt", "ReplicasMade", "ParametersMarked", "ExamplesSeen", "OptimizerMade", "ScalerMade"))


@dataclass(slots=True)
class Part:
    """What one process left. ``rank`` is None where it was no rank of a group; ``ended``: it came to its own end."""

    path: Path | None
    findings: list[Finding]
    summary: Summary
    rank: int | None = None
    world_size: int = 1
    where: str = ""
    began: float = 0.0
    finished: float = 0.0
    code: int | str | None = None
    by: str = "unknown"
    ended: bool = True
    argv: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Whole:
    """The run: findings folded and in order, one summary; ``main``: the part whose curve stands for it."""

    findings: tuple[Finding, ...]
    summary: Summary
    main: Part | None
    parts: list[Part]

    def code(self, own: int | None) -> int | str | None:
        """The exit status of several processes: that of the first that ended badly, else ``own``."""
        bad = [p for p in self.parts if p.by != "unknown" and p.code not in (0, None)]
        return min(bad, key=lambda p: p.finished).code if bad else own


def gathered(folder: Path, *, anew: bool = False) -> list[Part]:
    """The parts that lie in a record; ``anew``: judge their events again, whatever their own verdicts were.

    Raises `halfstep.errors.RecordError` where there are none.
    """
    return [_judged(path) if anew else _told(path) or _judged(path) for path in files(folder)]


def whole(parts: Sequence[Part]) -> Whole:
    """Put the parts of a run together."""
    found: list[Finding] = []
    summaries: list[Summary] = []
    main: Part | None = None
    notes: list[str] = []
    alone = [part for part in parts if part.rank is None or part.world_size < 2]
    worlds = list(_worlds([part for part in parts if part not in alone]))
    for members in (alone, *worlds):
        found += _once(members)
    for world in (*worlds, *([part] for part in alone)):
        first = world[0]
        notes += [f"{_named(p)} after its record ends, cut short" for p in world if not p.ended]
        if len(world) > 1:
            streams = {p.rank: _needed(p.path) for p in world if p.rank is not None and p.path is not None}
            try:
                found += compare(streams, cross_checks())
            except Exception as error:
                notes.append(f"ranks against each other: {type(error).__name__}: {error}")
        lost = first.world_size - len(world) if first.rank is not None else 0
        if lost > 0:
            notes.append(f"{lost} rank{'s' if lost > 1 else ''} that left no record here")
        summaries.append(first.summary)
        if main is None or first.summary.attempted > main.summary.attempted:
            main = first
    summary = _added(summaries)
    summary.not_judged = list(dict.fromkeys([*summary.not_judged, *notes]))
    return Whole(ranked(fold(found)), summary, main, list(parts))


# -- parts ---------------------------------------------------------------------------------------------------------


def _told(path: Path) -> Part | None:
    """By its own verdict."""
    known = verdict(path)
    if known is None:
        return None
    try:
        return Part(
            path,
            [restored(Finding, f) for f in known["findings"]],
            restored(Summary, known["summary"]),
            **{name: known[name] for name in ("rank", "world_size", "where", "began", "code", "by")},
            argv=tuple(known["argv"]),
            finished=known["ended"],
        )
    except (KeyError, TypeError, ValueError):
        return None  # another version's


def _judged(path: Path) -> Part:
    """By its events."""
    judge = Judge()
    part = Part(path, [], judge.summary, ended=False)
    for event in events(path):
        judge.see(event)
        _note(part, event)
    judge.end()
    part.findings, part.summary = judge.unfolded(), judge.summary
    return part


def _note(part: Part, event: Event) -> None:
    match event:
        case Started():
            part.began, part.argv = event.time, event.argv
            if event.world_size > 1:
                part.rank, part.world_size = event.rank, event.world_size
            part.facts = {
                "command": " ".join(event.argv),
                "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)),
                "versions": ", ".join(f"{k} {v}" for k, v in event.versions.items()),
                "devices": ", ".join(event.devices),
            }
        case GroupMade():
            part.rank, part.world_size, part.where = event.rank, event.world_size, event.where
        case Ended():
            part.code, part.by, part.ended = event.code, event.by, True
        case _:
            pass


def history(part: Part) -> History:
    """The curve of a part, from its events."""
    curve = History()
    for event in events(part.path) if part.path is not None else ():
        curve.see(event)
    return curve


def _named(part: Part) -> str:
    return "the run" if part.rank is None else f"rank {part.rank}"


# -- several ranks -------------------------------------------------------------------------------------------------


def _worlds(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The parts by group of ranks: of several groups that met in the same way, the n-th of each rank together."""
    groups: dict[tuple[Any, ...], dict[int, list[Part]]] = {}
    for part in sorted(parts, key=lambda p: p.began):
        assert part.rank is not None
        groups.setdefault((part.where, part.world_size), {}).setdefault(part.rank, []).append(part)
    for by_rank in groups.values():
        for n in range(max(map(len, by_rank.values()))):
            yield [members[n] for _, members in sorted(by_rank.items()) if len(members) > n]


def _once(world: Sequence[Part]) -> list[Finding]:
    """Each finding once, with the ranks that had it."""
    found: dict[tuple[Any, ...], tuple[Finding, list[int]]] = {}
    for part in world:
        for finding in part.findings:
            at = finding.at
            key = (finding.rule, at.file if at else "", at.line if at else 0, finding.module, finding.severity)
            old, ranks = found.get(key, (finding, []))
            if part.rank is not None:
                ranks.append(part.rank)
            found[key] = dataclasses.replace(old, count=max(old.count, finding.count)), ranks
    out = []
    for finding, ranks in found.values():
        if 0 < len(ranks) < len(world) and finding.rank is None:
            finding = dataclasses.replace(finding, rank=ranks[0], evidence={**finding.evidence, "ranks": ranks})
        out.append(finding)
    return out


def _needed(path: Path) -> Iterator[Event]:
    """The events that ranks are compared by; of a long run, those of every update at first and of some later."""
    attempts = 0
    for line in lines(path):
        kind = kind_of(line)
        if kind not in NEEDED:
            continue
        attempts += kind == "Attempt"
        if attempts > _DENSE and attempts % _SPARSE and kind not in _ALWAYS:
            continue
        event = parsed(line)
        if event is not None:
            yield event


def _added(summaries: Iterable[Summary]) -> Summary:
    total = Summary()
    for one in summaries:
        for name in ("attempted", "applied", "skipped", "empty", "micro_batches", "weighed"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        for name in ("opaque", "sizes", "precisions"):
            counts: dict[Any, int] = getattr(total, name)
            for key, count in getattr(one, name).items():
                counts[key] = counts.get(key, 0) + count
        total.scale_path = total.scale_path or [(int(n), float(s)) for n, s in one.scale_path]
        total.not_judged += one.not_judged
    return total


def merged(folder: Path, others: Sequence[Part] = (), *, anew: bool = False) -> Whole:
    """The whole of a record; ``others``: parts that are not in it. An empty folder is no error where there are some."""
    try:
        parts = gathered(folder, anew=anew)
    except RecordError:
        if not others:
            raise
        parts = []
    return whole([*others, *parts])
