"""Two runs judged from what they told: hand-made runs whose verdict is known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from halfstep.probe.runs.criterion import Criterion
from halfstep.probe.runs.pair import Account, Point, numbers, read
from halfstep.probe.runs.parting import TOLERANCES, pairs, parting, sameness
from halfstep.probe.runs.side import Teller, is_told
from halfstep.probe.runs.verdict import judge

FALLING = [2.0 * 0.95**k + 0.1 for k in range(60)]


def run(side, losses, *, halves=("float16",), outcomes=None, layers=None, data=None, random=None, start=1.0, **more):
    """A run of one backward an update."""
    points, applied = [], 0
    for k, loss in enumerate(losses):
        outcome = (outcomes or {}).get(k, "applied")
        applied += outcome == "applied"
        points.append(
            Point(
                optimizer=1,
                micro=k + 1,
                attempted=k + 1,
                applied=applied,
                outcome=outcome,
                loss=loss,
                norm=1.0,
                lr=0.1,
                layers=layers(k) if layers is not None else {},
                data=data(k) if data is not None else (float(k), 0.5, 1.0),
                random=k if random is None else random(k),
                weights={"a": start} if k == 0 else {},
            )
        )
    account = Account(side, points, halves=list(halves) if side == "own" else [], end={"code": 0})
    for name, value in more.items():
        setattr(account, name, value)
    return account


def verdict(own, fp32, jittered=None, scaled=None, **criterion):
    return judge(Criterion(**criterion), own, fp32, scaled, jittered)


# -- who is to blame -----------------------------------------------------------------------------------------------


def test_the_same_within_rounding_is_not_precision():
    own = run("own", [loss * (1 + 1e-3 * (-1) ** k) for k, loss in enumerate(FALLING)])
    found = verdict(own, run("fp32", FALLING))
    assert (found.blame, found.parted, found.wanted) == ("not precision", None, None)


def test_a_loss_that_stays_is_precision_once_chance_is_excluded():
    stuck = [max(loss, 1.0) for loss in FALLING]
    own, fp32 = run("own", stuck), run("fp32", FALLING)
    first = verdict(own, fp32)
    assert (first.blame, first.wanted) == ("precision", "jittered")
    near = run("jittered", [loss * 1.001 for loss in FALLING])
    found = verdict(own, fp32, near)
    assert (found.blame, found.wanted) == ("precision", None)
    assert "not chance" in found.words
    # The first update whose loss is further from FP32's than three times what random errors did, at least τ.
    allowed = [max(5e-3 * max(b, 0.1 * FALLING[0]), 3 * max(1e-3 * x for x in FALLING[: k + 1]))
               for k, b in enumerate(FALLING)]  # fmt: skip
    by_hand = next(k for k, (a, b) in enumerate(zip(stuck, FALLING, strict=True)) if abs(a - b) > allowed[k]) + 1
    assert found.parted is not None
    assert (found.parted.update, found.parted.what) == (by_hand, "loss")
    assert math.isclose(found.parted.allowed, allowed[by_hand - 1])


def test_apart_only_as_far_as_chance_goes_cannot_be_said():
    own, fp32 = run("own", [max(loss, 1.0) for loss in FALLING]), run("fp32", FALLING)
    found = verdict(own, fp32, run("jittered", [max(loss, 0.9) for loss in FALLING]))
    assert found.blame == "unknown"
    assert "by chance" in found.words


def test_small_drift_is_left_to_the_third_run():
    """Within τ·√k all the way, yet a tenth apart at the end: weights in BF16 that lose small updates."""
    own = run("own", [loss + 0.3 * k / 60 for k, loss in enumerate(FALLING)], halves=("bfloat16",))
    fp32 = run("fp32", [2.0 + loss for loss in FALLING])
    own.points = [replace(point, loss=point.loss + 2.0) for point in own.points]
    found = verdict(own, fp32)
    assert (found.blame, found.parted, found.wanted) == ("unknown", None, "jittered")
    found = verdict(own, fp32, run("jittered", [2.0 + loss for loss in FALLING]))
    assert found.blame == "precision"


@pytest.mark.parametrize("end", [math.nan, math.inf, 50.0])
def test_fp32_that_fails_too_acquits_precision(end):
    up = [2.0, 2.1, 3.0, 8.0, *[end] * 20]
    found = verdict(run("own", [2.0, 2.1, *[math.inf] * 22]), run("fp32", up))
    assert found.blame == "not precision"
    assert "learning rate" in found.words
    assert "from update 4 on" in found.words


def test_a_noisy_loss_that_does_not_fall_has_not_failed():
    noisy = [2.0, *[2.0 + 0.5 * (-1) ** k for k in range(30)], 2.5]
    found = verdict(run("own", noisy), run("fp32", noisy))
    assert found.blame == "not precision"
    assert "fails" not in found.words


def test_fp32_that_fails_without_growing_is_not_a_matter_of_the_rate():
    found = verdict(run("own", [2.0] * 30), run("fp32", [2.0, *[math.nan] * 29]))
    assert found.blame == "not precision"
    assert "learning rate" not in found.words
    assert "without growing" in found.words


def test_a_spike_at_the_end_is_no_failure():
    spiked = [2.0 + 0.01 * (-1) ** k for k in range(12)]
    spiked[5] = spiked[10] = 50.0
    found = verdict(run("own", [math.inf] * 12), run("fp32", spiked))
    assert (found.blame, found.wanted) == ("precision", "jittered")


def test_fp32_that_ends_worse_acquits_precision():
    found = verdict(run("own", FALLING), run("fp32", [max(loss, 1.0) for loss in FALLING]))
    assert found.blame == "not precision"
    assert "no better" in found.words


def test_a_scale_that_settles_is_not_to_blame():
    skipped = dict.fromkeys(range(6), "skipped")
    behind = [FALLING[max(0, k - 6)] for k in range(60)]
    found = verdict(run("own", behind, outcomes=skipped), run("fp32", FALLING))
    assert found.blame == "not precision"
    assert "6 updates behind" in found.words
    overflowing = run("own", [math.nan] * 6 + behind[6:], outcomes=skipped)  # no scale cures that
    assert verdict(overflowing, run("fp32", FALLING)).blame == "precision"
    short = verdict(run("own", behind[:12], outcomes=skipped), run("fp32", FALLING[:12]))
    assert short.blame == "unknown"
    assert "compare more updates" in short.words


def test_a_mishandled_scale_is_told_from_rounding():
    slow = [2.0 * 0.99**k + 0.1 for k in range(60)]
    found = {"rule": "clip-scaled-gradients", "severity": "error", "at": {"file": "/a/train.py", "line": 24}}
    own, fp32 = run("own", slow, verdict={"findings": [found]}), run("fp32", FALLING)
    assert verdict(own, fp32).wanted == "jittered"  # no scale was on
    own.points = [replace(point, scale=1024.0) for point in own.points]
    first = verdict(own, fp32)
    assert (first.blame, first.wanted) == ("unknown", "scaled")
    decided = verdict(own, fp32, scaled=run("scaled", slow))
    assert (decided.blame, decided.wanted) == ("not precision", None)
    assert "clip-scaled-gradients at train.py:24" in decided.words
    assert verdict(own, fp32, scaled=run("scaled", FALLING)).wanted == "jittered"


def test_skips_that_never_end_are_not_settling():
    own = run("own", [FALLING[0]] * 60, outcomes=dict.fromkeys(range(60), "skipped"))
    found = verdict(own, run("fp32", FALLING), run("jittered", FALLING))
    assert found.blame == "precision"
    assert any("60 of 60" in note for note in found.notes)


def test_an_exception_that_fp32_goes_past_is_precision():
    own = run("own", FALLING[:12], raised={"type": "FloatingPointError", "message": "nan", "at": "train.py:9"})
    found = verdict(own, run("fp32", FALLING[:22]))
    assert found.blame == "precision"
    assert "FloatingPointError at train.py:9" in found.words
    assert verdict(own, run("fp32", FALLING[:12])).blame == "unknown"
    at_once = run("own", [], raised={"type": "RuntimeError", "message": "no Half", "at": "train.py:9"})
    found = verdict(at_once, run("fp32", FALLING[:10]))
    assert found.blame == "precision"
    assert "RuntimeError at train.py:9: no Half, before any update" in found.words
    asked = {"type": "EOFError", "message": "EOF when reading a line", "at": "train.py:2"}
    found = verdict(run("own", [], raised=asked), run("fp32", [], raised=asked))
    assert found.blame == "unknown"
    assert "both runs ended by EOFError" in found.words
    assert "standard input is empty" in found.words


def together(*runs):
    """Runs of one optimizer each as one run of several, in turn."""
    points = [point for turn in zip(*(r.points for r in runs), strict=True) for point in turn]
    numbered = [replace(p, optimizer=1 + k % len(runs), micro=k + 1, attempted=k + 1) for k, p in enumerate(points)]
    return replace(runs[0], points=numbered)


def test_every_optimizer_is_judged_and_the_one_that_suffers_is_named():
    """The second's losses are 1e-8 times the first's, which are the same in both."""
    small, stuck = [1e-8 * loss for loss in FALLING], [1e-8 * max(loss, 1.0) for loss in FALLING]
    own, fp32 = (together(run(side, FALLING), run(side, losses)) for side, losses in (("own", stuck), ("fp32", small)))
    first = verdict(own, fp32)
    assert (first.blame, first.wanted) == ("precision", "jittered")
    found = verdict(own, fp32, together(run("jittered", FALLING), run("jittered", small)))
    assert (found.blame, found.wanted) == ("precision", None)
    assert "loss of optimizer 2" in found.words
    assert found.parted is not None
    assert (found.parted.what, found.parted.optimizer) == ("loss", 2)
    none = verdict(fp32, fp32)
    assert none.blame == "not precision"
    own.points = [replace(b, loss=b.loss * 1.001) for b in fp32.points]
    found = verdict(own, fp32)
    assert (found.blame, found.parted) == ("not precision", None)
    assert "of optimizer 1" in found.words
    assert "of optimizer 2" in found.words


def test_of_adversaries_one_without_a_gradient_is_seen_though_no_loss_is_better():
    rising = [1.3 + 0.3 * k / 60 for k in range(60)]
    lost = {"layers": lambda k: {"g": 0.0}}
    kept = {"layers": lambda k: {"g": 1e-8}}
    own = together(run("own", [1.3] * 60), run("own", [0.7] * 60, **lost))
    fp32 = together(run("fp32", rising), run("fp32", [0.7 + 0.1 * k / 60 for k in range(60)], **kept))
    found = verdict(own, fp32)
    assert (found.blame, found.wanted) == ("precision", None)
    assert "optimizer 2 gets no gradient from update 2 on" in found.words
    held = together(run("own", [1.3] * 60), run("own", [0.7] * 60, **kept))
    assert verdict(held, fp32).blame == "not precision"


def test_fp32_fails_where_the_losses_of_all_its_optimizers_rise():
    rising, worse = ([1.3 * rate**k for k in range(60)] for rate in (1.05, 1.06))
    own, fp32 = (together(run(side, x), run(side, x)) for side, x in (("own", worse), ("fp32", rising)))
    found = verdict(own, fp32)
    assert (found.blame, found.wanted) == ("not precision", None)
    assert "FP32 fails too (loss of optimizer 1" in found.words


@pytest.mark.parametrize("status", [0, 1])
def test_a_run_that_stops_by_itself_is_not_acquitted_by_what_it_did_before(status):
    own = run("own", FALLING[:15], end={"code": status})
    fp32 = run("fp32", FALLING)
    first = verdict(own, fp32)
    assert (first.blame, first.wanted) == ("unknown", "jittered")
    assert "after 15 of the 60 updates" in first.words
    found = verdict(own, fp32, run("jittered", FALLING))
    assert (found.blame, found.wanted) == ("precision", None)
    assert verdict(own, fp32, run("jittered", FALLING[:40])).blame == "unknown"
    assert verdict(own, run("fp32", FALLING, end={"code": 1}), run("jittered", FALLING)).blame == "unknown"
    assert verdict(replace(own, end=None), fp32).blame == "not precision"  # cut short from outside


# -- when nothing can be said --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "fp32", "said"),
    [
        ({}, {"data": lambda k: (k + 1.0, 0.5, 1.0)}, "from the first update on"),
        ({}, {"data": lambda k: (float(k), 0.55, 1.0)}, "from the first update on"),
        ({}, {"data": lambda k: (float(k), 0.5 + (k > 4), 1.0)}, "from update 6 on"),
        ({}, {"start": 1.001}, "other parameters"),
        ({"losses": []}, {"losses": []}, "no update was seen"),
        ({}, {"losses": []}, "was not reached"),
        ({"losses": [None] * 5}, {}, "no loss was seen"),
        ({}, {"losses": FALLING[:3], "raised": {"type": "E", "message": "m", "at": "x:1"}}, "after 3 updates by E: m"),
    ],
)
def test_what_makes_runs_incomparable_is_named(own, fp32, said):
    own, fp32 = {"losses": FALLING, **own}, {"losses": FALLING, **fp32}
    found = verdict(run("own", own.pop("losses"), **own), run("fp32", fp32.pop("losses"), **fp32))
    assert found.blame == "unknown"
    assert said in found.words


@pytest.mark.parametrize("scale", [0.8, 1.2])
def test_other_data_that_nobody_saw_shows_in_the_first_loss(scale):
    """Whichever of the two is better: the losses of equal parameters are of other data."""
    unseen = {"data": lambda k: (0.0, 0.0, 0.0)}
    own, fp32 = run("own", [scale * x for x in FALLING], **unseen), run("fp32", FALLING, **unseen)
    first = verdict(own, fp32)
    assert (first.blame, first.wanted, first.parted) == ("unknown", "jittered", None)
    found = verdict(own, fp32, run("jittered", [1.1 * x for x in FALLING], **unseen))
    assert (found.blame, found.wanted) == ("unknown", None)
    assert "not the same twice" in found.words
    assert "sensitive" not in found.words


def test_a_first_loss_that_half_precision_spoils_is_precision_where_fp32_repeats_itself():
    own, fp32 = run("own", [1.5 * x for x in FALLING]), run("fp32", FALLING)
    assert verdict(own, fp32).wanted == "jittered"
    near = run("jittered", [FALLING[0], *(1.001 * x for x in FALLING[1:])])
    assert verdict(own, fp32, near).blame == "precision"
    better = run("own", [0.5 * x for x in FALLING])
    assert verdict(better, fp32).wanted == "jittered"
    assert verdict(better, fp32, near).blame == "not precision"
    own.points, fp32.points = own.points[4:], fp32.points[4:]  # in common only later updates: trained by then
    assert "first update" not in verdict(own, fp32).words


def test_the_same_first_loss_with_another_gradient_is_looked_into_where_no_data_was_seen():
    unseen = {"data": lambda k: (0.0, 0.0, 0.0)}
    own, fp32 = (run(s, FALLING, layers=lambda k, n=n: {"a": n}, **unseen) for s, n in (("own", 1.5), ("fp32", 1.0)))
    assert verdict(own, fp32).wanted == "jittered"
    again = run("jittered", FALLING, layers=lambda k: {"a": 1.2}, **unseen)
    assert "not the same twice" in verdict(own, fp32, again).words


def test_inputs_cast_to_half_are_the_same_data():
    own, fp32 = (run(side, FALLING, data=lambda k, x=x: (0.0, x, 1.0)) for side, x in (("own", 0.503), ("fp32", 0.5)))
    assert verdict(own, fp32).same.data is None


def test_other_random_numbers_are_named_where_they_matter():
    own = run("own", [max(loss, 1.0) for loss in FALLING], random=lambda k: -k)
    found = verdict(own, run("fp32", FALLING))
    assert found.blame == "unknown"
    assert "other random numbers" in found.words
    assert verdict(run("own", FALLING, random=lambda k: -k), run("fp32", FALLING)).blame == "not precision"


def test_a_script_in_fp32_has_no_precision_to_blame():
    assert verdict(run("own", FALLING, halves=()), run("fp32", FALLING)).blame == "not precision"


def test_what_is_still_half_in_fp32_is_no_reference():
    fp32 = run("fp32", FALLING)
    fp32.halves = ["bfloat16"]
    found = verdict(run("own", FALLING), fp32)
    assert found.blame == "unknown"
    assert "bfloat16 was still seen in it" in found.words
    assert verdict(run("own", [max(loss, 1.0) for loss in FALLING]), fp32).blame == "precision"


# -- the criterion -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tolerance", "share", "blame"),
    [
        (0.05, False, "not precision"),
        (0.03, False, "precision"),
        (0.05, True, "not precision"),
        (0.04, True, "precision"),
    ],
)
def test_a_number_of_the_script_is_judged_by_the_tolerance_given(tolerance, share, blame):
    own = run("own", [max(loss, 1.0) for loss in FALLING], metrics={"accuracy": [0.5, 0.91]})
    fp32 = run("fp32", FALLING, metrics={"accuracy": [0.5, 0.95]})
    assert verdict(own, fp32, metric="accuracy", tolerance=tolerance, share=share).blame == blame


@pytest.mark.parametrize(
    ("better", "blame"), [(None, "precision"), ("higher", "not precision"), ("lower", "precision")]
)
def test_which_way_a_number_is_better_can_be_said(better, blame):
    own, fp32 = run("own", FALLING, metrics={"val": [0.9]}), run("fp32", FALLING, metrics={"val": [0.5]})
    found = verdict(own, fp32, run("jittered", FALLING, metrics={"val": [0.5]}), metric="val", better=better)
    assert found.blame == blame
    assert ("any difference counts" in found.words) == (better is None)


def test_a_number_that_was_not_found_is_asked_for():
    found = verdict(run("own", FALLING), run("fp32", FALLING, metrics={"accuracy": [0.9]}), metric="accuracy")
    assert found.blame == "unknown"
    assert 'no number "accuracy" was found as it is' in found.words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("epoch 3 acc: 0.91 val_acc: 0.5\nacc=92%", [0.91, 0.92]),
        ('{"acc": 1.5e-3, "x": 2}', [0.0015]),
        ("ACC nan, acc inf, acc -2", [math.nan, math.inf, -2.0]),
        ("accuracy: 0.9 my.acc: 0.1", []),
        ("acc .5", [0.5]),
        ("acc: 1,200\nacc: 12,345.5, acc=1,200,000", [1200.0, 12345.5, 1200000.0]),
        ("acc: 3,2000 acc: 1,2", [3.0, 1.0]),
    ],
)
def test_numbers_of_an_output(text, found):
    assert numbers("acc", text) == pytest.approx(found, nan_ok=True)


# -- where they part -----------------------------------------------------------------------------------------------


def test_the_layer_whose_gradient_vanishes_is_named_first():
    own = run("own", FALLING, layers=lambda k: {"in": 0.0 if k >= 3 else 1.0, "out": 2.0})
    fp32 = run("fp32", FALLING, layers=lambda k: {"in": 1.0, "out": 2.0 + 1e-4})
    found = parting(pairs(own, fp32), "float16")
    assert found is not None
    assert (found.update, found.what, found.layer, found.own, found.fp32) == (4, "layer", "in", 0.0, 1.0)
    assert math.isclose(found.allowed, TOLERANCES["float16"] * math.sqrt(4))


def test_one_spike_is_no_parting():
    spiked = [loss * (2.0 if k == 10 else 1.0) for k, loss in enumerate(FALLING)]
    assert parting(pairs(run("own", spiked), run("fp32", FALLING)), "float16") is None


def test_updates_are_matched_by_the_data_they_used():
    """A script that passes over two micro-batches in half precision makes its next update of the same later data."""
    own, fp32 = run("own", FALLING), run("fp32", FALLING)
    own.points = [p for p in own.points if p.micro not in (5, 6)]
    assert [(a.micro, b.micro) for a, b in pairs(own, fp32)] == [(k, k) for k in range(1, 61) if k not in (5, 6)]
    assert sameness(pairs(own, fp32)).data is None


# -- what is written down ------------------------------------------------------------------------------------------


def test_what_a_killed_run_told_is_read_as_far_as_it_came(tmp_path: Path):
    teller = Teller(tmp_path)
    for point in run("own", [2.0, math.nan]).points:
        teller.tell("update", **{name: getattr(point, name) for name in Point.__slots__})
    teller.tell("metric", name="acc", value=0.5, attempts=2)
    teller.flush()
    with open(tmp_path / "told.jsonl", "a") as file:
        file.write('{"kind": "upd')
    (tmp_path / "output.txt").write_text("other: 3")
    account = read("own", tmp_path, "other")
    assert [p.micro for p in account.points] == [1, 2]
    assert math.isnan(account.points[1].loss or 0.0)
    assert account.metrics == {"acc": [0.5], "other": [3.0]}
    assert account.end is None


def test_a_long_run_is_told_ever_more_seldom():
    told = [n for n in range(1, 200_000) if is_told(n)]
    assert told[:4096] == list(range(1, 4097))
    assert len(told) < 4096 * 7
    assert max(b - a for a, b in pairwise(told)) <= 32
