"""A record is read back as it was written, whole or cut short, and stays small."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import RecordError
from halfstep.events import Attempt, Contribution, Event, Place, ScaleUpdated, Share, Started, decode, encode
from halfstep.record.columns import Columns
from halfstep.record.history import History
from halfstep.record.reader import events, ranks
from halfstep.record.writer import RecordWriter

numbers = st.one_of(st.none(), st.floats(), st.integers(-3, 3).map(float))
places = st.one_of(st.none(), st.builds(Place, st.text(max_size=9), st.integers(0, 999), st.text(max_size=9)))
shares = st.builds(
    Share,
    loss=st.just("cross_entropy"),
    reduction=st.just("mean"),
    positions=st.integers(0, 99),
    supervised=st.one_of(st.none(), st.integers(0, 99)),
    weight_sum=numbers,
    divisor=numbers,
    total=st.floats(),
    coefficient=st.floats(),
    spread=st.floats(),
    ignored_share=st.floats(),
)
some_events = st.one_of(
    st.builds(
        Contribution,
        number=st.integers(0, 9),
        at=places,
        optimizers=st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=3),
        shares=st.lists(shares, max_size=3).map(tuple),
        loss=numbers,
        opaque=st.one_of(st.none(), st.text(max_size=9)),
    ),
    st.builds(Attempt, optimizer=st.integers(0, 9), outcome=st.sampled_from(["applied", "skipped"]), norm=numbers),
    st.builds(Started, argv=st.lists(st.text(max_size=5), max_size=3).map(tuple), time=st.floats(0, 1e9)),
    st.builds(ScaleUpdated, scaler=st.integers(0, 9), before=numbers, after=numbers),
)


def same(a: object, b: object) -> bool:
    return repr(a) == repr(b)  # NaN included


@given(some_events)
def test_an_event_survives_its_line(event: Event) -> None:
    line = encode(event)
    assert "\n" not in line
    back = decode(line)
    assert same(back, event)


def test_a_line_of_a_later_version_is_passed_over() -> None:
    assert decode('{"kind":"SomethingNew","seq":3}') is None
    assert decode('{"kind":"Attempt","optimizer":1,"later":[1]}') == Attempt(optimizer=1)


def test_a_record_cut_anywhere_gives_what_was_written(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, rank=3)
    written = [Attempt(seq=n, optimizer=1, norm=float(n)) for n in range(500)]
    for event in written:
        writer.write(event)
        if event.seq % 50 == 0:
            writer.flush()
    writer.close()
    path = ranks(tmp_path)[3]
    assert list(events(path)) == written
    data = path.read_bytes()
    counts = []
    for cut in range(0, len(data), 97):
        path.write_bytes(data[:cut])
        back = list(events(path))
        assert back == written[: len(back)]
        counts.append(len(back))
    assert counts == sorted(counts)
    assert counts[-1] > 400


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    RecordWriter(tmp_path).close()
    with pytest.raises(RecordError, match="exists already"):
        RecordWriter(tmp_path)
    with pytest.raises(RecordError, match="holds no events"):
        ranks(tmp_path / "nowhere")


@given(st.integers(1, 5000), st.integers(1, 60), st.sets(st.integers(0, 4999), max_size=20))
def test_columns_are_bounded_even_and_keep_anomalies(count: int, width: int, strange: set[int]) -> None:
    columns: Columns[int] = Columns(width)
    for number in range(count):
        columns.append(number, anomaly=number in strange)
    held = [number for number, row in columns if number == row]
    assert len(held) == len(columns)
    assert strange & set(range(count)) <= set(held)
    ordinary = [n for n in held if n not in strange]
    assert len(ordinary) <= width
    assert set(ordinary) == {n for n in range(0, count, columns.stride) if n not in strange}


def test_the_record_of_a_hundred_thousand_updates_is_small(tmp_path: Path) -> None:
    """Per update: what a plain fp16 loop writes (some eight events); 20,000 of them stand for 100,000."""
    at = Place("train.py", 12, "main")
    writer, history = RecordWriter(tmp_path), History()
    share = Share("cross_entropy", "mean", 512, 480, 480.0, 480.0, 1.0, 1 / 480, 0.0, 0.0)
    updates = 20_000
    for n in range(updates):
        noise = math.sin(n) * 0.1
        for event in (
            Contribution(seq=n, at=at, number=n, optimizers={1: 1000}, scale=65536.0, shares=(share,), loss=2 + noise),
            Attempt(seq=n, at=at, optimizer=1, via="scaler", norm=1 + noise, lr=1e-3 * (1 + noise)),
            ScaleUpdated(seq=n, at=at, scaler=1, before=65536.0, after=65536.0),
        ):
            writer.write(event)
            history.see(event)
    writer.close()
    assert ranks(tmp_path)[0].stat().st_size * (100_000 / updates) < 25e6
    assert len(history.rows) <= 2000
