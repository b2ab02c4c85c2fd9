"""Where a micro-batch's half-precision gradients lay: a strip of powers of two for each module, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from halfstep.events import GradientsMeasured, LayerGradient

_LOW, _HIGH = -26, 18  # powers of two drawn; FP16 ends within
_LIMITS = ((-24, "smallest"), (-14, "smallest normal"), (16, "largest"))  # of FP16
_NAME, _CELL, _ROW, _TOP, _LOST, _BOTTOM = 190, 8, 15, 40, 96, 8
_MOST = 32


def strips(event: GradientsMeasured) -> str:
    """One figure; empty where no gradient was measured.

    A cell's darkness is the root of its share of the module's elements, so that a thousandth is seen. The numbers
    carry the loss scale, as they did when they were held in half precision.
    """
    rows = [layer for layer in event.activations if layer.exponents]
    if not rows:
        return ""
    if len(rows) > _MOST:  # those that lose most, and among the others those nearest to an end of the range
        keep = set(map(id, sorted(rows, key=_risk)[-_MOST:]))
        rows = [layer for layer in rows if id(layer) in keep]
    width, height = _NAME + (_HIGH - _LOW) * _CELL + _LOST, _TOP + len(rows) * _ROW + _BOTTOM
    scale = "" if event.scale is None else f", times the loss scale {event.scale:g}"
    title = f"gradients in {event.dtype}{scale}, micro-batch {event.micro}"
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="0" y="13">{escape(title)}</text>',
    ]
    for power, label in _LIMITS:
        x = _x(power)
        parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{height - _BOTTOM}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x}" y="{_TOP - 10}">{label}</text>')
    parts.append(f'<text class="tick" x="{_x(_HIGH) + 8}" y="{_TOP - 10}">lost to zero</text>')
    for number, layer in enumerate(rows):
        parts += _row(layer, _TOP + number * _ROW)
    left_out = len([layer for layer in event.activations if layer.exponents]) - len(rows)
    note = f"<p class='dim'>{left_out} other modules lose less and lie further from the ends</p>" if left_out else ""
    return f"<figure>{''.join(parts)}</svg>{note}</figure>"


def _row(layer: LayerGradient, y: int) -> list[str]:
    cells: dict[int, int] = {}
    for exponent, count in layer.exponents.items():
        place = min(max(int(exponent), _LOW), _HIGH - 1)
        cells[place] = cells.get(place, 0) + count
    most, all_ = max(cells.values()), sum(cells.values())
    lost = layer.lost / layer.kept if layer.kept else 0.0
    name = layer.name if len(layer.name) <= 30 else "…" + layer.name[-29:]
    out = [f'<text class="tick" text-anchor="end" x="{_NAME - 8}" y="{y + 10}">{escape(name)}</text>']
    for place, count in sorted(cells.items()):
        darkness = math.sqrt(count / most)
        out.append(
            f'<rect class="cell" x="{_x(place)}" y="{y}" width="{_CELL}" height="{_ROW - 3}" opacity="{darkness:.2f}">'
            f"<title>{count / all_:.2%} from 2^{place}</title></rect>"
        )
    if lost:
        out.append(f'<text class="tick" x="{_x(_HIGH) + 8}" y="{y + 10}">{lost:.1%}</text>')
    return out


def _risk(layer: LayerGradient) -> tuple[float, float]:
    powers: Sequence[int] = [int(e) for e in layer.exponents]
    near = min(16 - max(powers), min(powers) + 24)
    return layer.lost / layer.kept if layer.kept else 0.0, -float(near)


def _x(power: int) -> int:
    return _NAME + (power - _LOW) * _CELL
