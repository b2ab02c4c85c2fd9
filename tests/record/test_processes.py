"""A record of several processes: each has a file of its own, found and told apart whatever their ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from halfstep.checks.judge import Summary
from halfstep.errors import RecordError
from halfstep.events import (
    Attempt,
    Contribution,
    Ended,
    Event,
    Finding,
    GradientsCleared,
    GroupMade,
    Place,
    ReplicaBackward,
    ReplicasMade,
    Share,
    Started,
    flat,
)
from halfstep.record.reader import events, files, kind_of, lines, ranks, verdict
from halfstep.record.writer import RecordWriter
from halfstep.report.ranks import gathered, merged


def test_files_are_named_by_rank_as_soon_as_it_is_known(tmp_path: Path) -> None:
    first, again = (RecordWriter(tmp_path, 1, among_others=True) for _ in range(2))
    child = RecordWriter(tmp_path, None, among_others=True)
    child.write(Attempt(seq=1, optimizer=1))
    assert child.path.name.startswith("events-pid")
    child.named(1)
    child.write(Attempt(seq=2, optimizer=1))
    for writer in (first, again, child):
        writer.close()
    assert [p.name for p in files(tmp_path)] == [f"events-rank1{n}.jsonl.gz" for n in ("-2", "-3", "")]
    assert [e.seq for e in events(tmp_path / "events-rank1-3.jsonl.gz")] == [1, 2]
    assert ranks(tmp_path) == {1: tmp_path / "events-rank1.jsonl.gz"}
    with pytest.raises(RecordError):
        RecordWriter(tmp_path, 1)


def test_kinds_are_told_without_reading_a_line(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    writer.write(Attempt(optimizer=1))
    writer.close({"said": True})
    assert [kind_of(line) for line in lines(writer.path)] == ["Attempt", ""]
    assert verdict(writer.path) == {"said": True}
    assert verdict(tmp_path / "events-rank9.jsonl.gz") is None


AT = Place("train.py", 7)


def written(folder: Path, rank: int, *, where: str = "here", told: bool = True, updates: int = 3) -> None:
    """A rank with a mean over 4 or 12 elements an update, and a warning of its own."""
    count = 4 if rank == 0 else 12
    share = Share(
        loss="mse", reduction="mean", positions=count, supervised=count, weight_sum=float(count),
        divisor=float(count), total=1.0, coefficient=1 / count, spread=0.0, ignored_share=0.0,
    )  # fmt: skip
    writer = RecordWriter(folder, rank, among_others=True)
    written: list[Event] = [Started(rank=rank, world_size=2), GroupMade(rank=rank, world_size=2, where=where)]
    written.append(ReplicasMade(module=1, ranks=(0, 1)))
    for n in range(1, updates + 1):
        written.append(Contribution(number=n, micro=n, optimizers={1: 2}, shares=(share,), at=AT, loss_at=AT))
        written.append(ReplicaBackward(contribution=n, micro=n, module=1, optimizers=(1,), ranks=(0, 1), forwards=1))
        written.append(Attempt(optimizer=1, micro=n, at=Place("train.py", 9)))
        written.append(GradientsCleared(optimizers={1: 2}, micro=n))
    for n, event in enumerate([*written, Ended()] if told else written):
        writer.write(dataclasses.replace(event, seq=n + 1))
    own = Finding(rule="made-up", severity="warning", message="of this rank", at=Place("train.py", 3))
    summary = Summary(attempted=updates, applied=updates, micro_batches=updates, weighed=updates)
    told_words = {
        "rank": rank, "world_size": 2, "where": where, "began": 1.0, "ended": 2.0, "code": rank, "by": "script",
        "argv": ["train.py"], "findings": [flat(own)] if rank else [], "summary": flat(summary),
    }  # fmt: skip
    writer.close(told_words if told else None)


def test_ranks_are_merged_once_and_compared(tmp_path: Path) -> None:
    written(tmp_path, 0)
    written(tmp_path, 1)
    whole = merged(tmp_path)
    assert [(f.rule, f.rank) for f in whole.findings] == [("mean-of-means-across-replicas", None), ("made-up", 1)]
    assert whole.findings[0].at == AT
    assert whole.findings[0].count == 3
    assert (whole.summary.attempted, whole.summary.micro_batches) == (3, 3)
    assert whole.code(0) == 1


def test_two_groups_that_met_in_the_same_way_are_two(tmp_path: Path) -> None:
    for _ in range(2):
        written(tmp_path, 0)
        written(tmp_path, 1)
    whole = merged(tmp_path)
    assert whole.summary.attempted == 6
    assert [f.rule for f in whole.findings].count("made-up") == 2
    assert len(gathered(tmp_path)) == 4


def test_a_rank_cut_short_and_one_that_left_nothing_are_said(tmp_path: Path) -> None:
    written(tmp_path, 0)
    written(tmp_path, 1, told=False, updates=2)
    whole = merged(tmp_path)
    assert [f.rule for f in whole.findings] == ["mean-of-means-across-replicas"]
    assert whole.findings[0].count == 2
    assert whole.summary.not_judged == ["rank 1 after its record ends, cut short"]
    other = tmp_path / "other"
    written(other, 1, told=False)
    assert "1 rank that left no record here" in merged(other).summary.not_judged
