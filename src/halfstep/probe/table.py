"""Plain text tables: columns of one width, numbers to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of aligned columns; the first ``left`` columns are flush left, and so is the last where it is words."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def percent(value: float | None) -> str:
    """ "0.31 %"; "inf" where half precision was not finite, "-" where nothing was compared."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "inf" if value > 0 else str(value)
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def power(scale: float) -> str:
    """ "2^16", or the number itself where it is no power of two."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
