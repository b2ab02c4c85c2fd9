"""A comparison as one HTML file: the verdict, both curves in one figure, updates and layers side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from halfstep.report.chart import curve
from halfstep.report.comparison import BLAME, lines, named_layers, shown, update_rows
from halfstep.report.page import whole

_CSS = {"precision": "bad", "not precision": "good", "unknown": ""}


def comparison_page(doc: Mapping[str, Any]) -> str:
    """The whole file, from the document of a comparison."""
    verdict, title = doc["verdict"], doc["command"]
    body = [
        f'<header><p class="brand">halfstep compare</p><h1>{escape(title)}</h1>'
        f'<p class="verdict {_CSS[verdict["blame"]]}">{escape(BLAME[verdict["blame"]][0])}</p>'
        f"<p>{escape(verdict['words'])}</p></header>",
        "<section><h2>Seen</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines(doc)) + "</section>",
        _curves(doc),
        _updates(doc),
        _layers(doc),
    ]
    return whole(title, body)


def _curves(doc: Mapping[str, Any]) -> str:
    rows: Sequence[Mapping[str, Any]] = doc["updates"]
    figures = []
    for optimizer in sorted({row["optimizer"] for row in rows})[:4]:
        own = [row for row in rows if row["optimizer"] == optimizer]
        skipped = [float(row["update"]) for row in own if row["own"]["outcome"] == "skipped"][:400]
        for field, name in (("loss", "loss"), ("norm", "gradient norm"), ("lr", "learning rate")):
            both = [[(float(row["update"]), row[side][field]) for row in own] for side in ("own", "fp32")]
            if field == "lr" and len({y for _, y in both[0]} | {y for _, y in both[1]}) < 2:
                continue
            figures.append(
                curve(
                    f"{name}: as it is (thin), in FP32 (wide)",
                    both[0],
                    beside=both[1],
                    x_label="attempted update" + (" (lines: skipped as it is)" if skipped else ""),
                    log=field == "norm" or _is_wide([*both[0], *both[1]]),
                    marks=skipped,
                    mark_label="skipped update",
                )
            )
    drawn = "".join(f"<figure>{figure}</figure>" for figure in figures if figure)
    return f"<section><h2>Both runs</h2>{drawn}</section>" if drawn else ""


def _is_wide(points: Sequence[tuple[float, float | None]]) -> bool:
    """Whether a curve spans so much that only its magnitude can be drawn."""
    finite = [y for _, y in points if y is not None and math.isfinite(y)]
    return bool(finite) and min(finite) > 0.0 and max(finite) > 100.0 * min(finite)


def _updates(doc: Mapping[str, Any]) -> str:
    titles, rows = update_rows(doc)
    return _table("Updates", titles, [cells for cells, _ in rows])


def _layers(doc: Mapping[str, Any]) -> str:
    titles = ["layer", "gradient norm", "in FP32", "times what rounding explains"]
    return "".join(
        _table(
            f"Layers furthest apart at update {layers[0]['update']}",
            titles,
            [[layer["layer"] or "the model", layer["own"], layer["fp32"], layer["excess"]] for layer in layers],
        )
        for layers in named_layers(doc)
    )


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = (
        "".join(f"<td style='white-space:nowrap'>{escape(_cell(value))}&emsp;</td>" for value in row) for row in rows
    )
    return (
        f"<section><h2>{escape(title)}</h2><table><tr>{head}</tr>"
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + "</table></section>"
    )


def _cell(value: Any) -> str:
    return shown(value) if value is None or isinstance(value, float) else str(value)
