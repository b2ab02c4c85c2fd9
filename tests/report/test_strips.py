"""Half-precision gradients in the HTML report: which module lay where in the range, and what it lost."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from halfstep.checks.judge import Summary
from halfstep.events import GradientsMeasured, LayerGradient
from halfstep.record.history import History
from halfstep.report.exponents import strips
from halfstep.report.page import page


def layer(name: str, exponents: dict[int, int], lost: int = 0) -> LayerGradient:
    held = sum(exponents.values())
    return LayerGradient(name, held + lost, held + lost, lost, exponents=exponents)


def event(*layers: LayerGradient) -> GradientsMeasured:
    return GradientsMeasured(seq=1, at=None, micro=4, scale=1024.0, activations=layers)


def figure(measured: GradientsMeasured) -> ElementTree.Element:
    return ElementTree.fromstring(strips(measured))


def test_a_cell_is_a_power_of_two_and_its_darkness_the_root_of_its_share() -> None:
    drawn = figure(event(layer("net.up", {-20: 400, -10: 100, 3: 25})))
    cells = list(drawn.iter("rect"))
    places = [float(cell.attrib["x"]) for cell in cells]
    assert [float(cell.attrib["opacity"]) for cell in cells] == [1.0, 0.5, 0.25]
    assert (places[2] - places[1]) * 10 == (places[1] - places[0]) * 13
    assert [cell.findtext("title") for cell in cells] == ["76.19% from 2^-20", "19.05% from 2^-10", "4.76% from 2^3"]
    text = " ".join(drawn.itertext())
    assert "times the loss scale 1024" in text
    assert "micro-batch 4" in text


def test_what_was_lost_stands_beside_and_names_are_text() -> None:
    text = strips(event(layer("<b>&", {-24: 90}, lost=30), layer("net.1", {0: 5})))
    assert "25.0%" in text
    assert "<b>" not in text
    assert "".join(figure(event(layer("<b>&", {-24: 1}))).itertext()).count("<b>&") == 1
    assert strips(event(layer("net.0", {}))) == ""


def test_of_many_modules_those_at_risk_are_drawn() -> None:
    safe = [layer(f"safe.{n}", {-5: 10, 0: 10}) for n in range(60)]
    text = strips(event(*safe, layer("starving", {-24: 10}, lost=90), layer("high", {14: 1, 15: 1})))
    assert "starving" in text
    assert "high" in text
    assert "30 other modules" in text
    assert text.count("safe.") == 30


def test_the_report_draws_the_last_that_were_measured() -> None:
    history = History()
    assert "Half-precision gradients" not in page("train.py", [], Summary(), history, {})
    history.see(event(layer("first", {0: 1})))
    history.see(event(layer("second", {0: 1})))
    text = page("train.py", [], Summary(), history, {})
    assert "Half-precision gradients" in text
    assert "second" in text
    assert "first" not in text
