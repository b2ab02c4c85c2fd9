"""Small figures as SVG text: no script, so that they print and can be pasted into a paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

Map = Callable[[float], float]
WIDTH, HEIGHT = 640, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 22, 24


def curve(
    title: str,
    points: Sequence[tuple[float, float | None]],
    *,
    x_label: str,
    log: bool = False,
    base: float = 10.0,
    steps: bool = False,
    marks: Sequence[float] = (),
    mark_label: str = "",
    beside: Sequence[tuple[float, float | None]] = (),
) -> str:
    """A line over ``points`` (x, y); y None or non-finite leaves a gap. ``marks``: x positions of skipped updates.

    ``beside``: another line in the same axes, drawn under the first. ``log``: a logarithmic y axis in powers of
    ``base``. ``steps``: y holds until the next point.
    """
    drawn = [(x, y) for x, y in (*points, *beside) if y is not None and math.isfinite(y) and (not log or y > 0)]
    if not drawn:
        return ""
    up: Map = (lambda y: math.log(y, base)) if log else float
    xs = [x for x, _ in (*points, *beside)]
    ys = [up(y) for _, y in drawn]
    x0, x1 = min(xs), max(xs)
    y0, y1 = min(ys), max(ys)
    if y1 - y0 < 1e-12 * max(1.0, abs(y1)):
        y0, y1 = y0 - 0.5, y1 + 0.5
    span = (x1 - x0) or 1.0

    def px(x: float) -> float:
        return _LEFT + (x - x0) / span * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="13">{escape(title)}</text>',
    ]
    for y in _ticks(y0, y1, least=1.0 if log and y1 - y0 >= 1 else 0.0):
        label = _power(base, y) if log else f"{y:g}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py(y):.1f}" y2="{py(y):.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{py(y) + 3.5:.1f}">{label}</text>')
    for x, anchor in ((x0, "start"), (x1, "end")):
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{px(x):.1f}" y="{HEIGHT - 8}">{x:g}</text>')
    parts.append(
        f'<text class="tick" text-anchor="middle" x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
    )
    for x in marks:
        parts.append(
            f'<line class="mark" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
            f"<title>{escape(mark_label)} {x:g}</title></line>"
        )
    parts.extend(f'<path class="curve beside" d="{d}"/>' for d in _paths(beside, px, py, up, log, steps))
    parts.extend(f'<path class="curve" d="{d}"/>' for d in _paths(points, px, py, up, log, steps))
    parts.append("</svg>")
    return "".join(parts)


def _paths(
    points: Sequence[tuple[float, float | None]], px: Map, py: Map, up: Map, log: bool, steps: bool
) -> list[str]:
    """Path data, one for every unbroken stretch."""
    out: list[str] = []
    pen: list[str] = []
    last = 0.0
    for x, y in points:
        if y is None or not math.isfinite(y) or (log and y <= 0):
            out, pen = ([*out, "".join(pen)] if pen else out), []
            continue
        height = py(up(y))
        if not pen:
            pen.append(f"M{px(x):.1f} {height:.1f}")
        elif steps:
            pen.append(f"L{px(x):.1f} {last:.1f}L{px(x):.1f} {height:.1f}")
        else:
            pen.append(f"L{px(x):.1f} {height:.1f}")
        last = height
    return [*out, "".join(pen)] if pen else out


def _ticks(low: float, high: float, wanted: int = 4, least: float = 0.0) -> list[float]:
    """Round numbers between low and high."""
    raw = max((high - low) / wanted, least)
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw)
    first = math.ceil(low / size)
    return [round(i * size, 12) for i in range(first, math.floor(high / size) + 1)]


def _power(base: float, exponent: float) -> str:
    if abs(exponent - round(exponent)) > 1e-9:
        return f"{base**exponent:.3g}"
    return f'{base:g}<tspan dy="-4" font-size="8">{round(exponent)}</tspan>'
