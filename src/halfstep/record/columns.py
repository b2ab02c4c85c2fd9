"""A long run in a bounded number of columns: every 2^k-th row is kept, and every row that is an anomaly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

WIDTH = 2000
_ANOMALIES = 4000

Row = TypeVar("Row")


class Columns(Generic[Row]):
    """Append rows; at most ``width`` ordinary ones are held, evenly spaced over the whole run.

    When they are full every second one is dropped and from then on only every 2^k-th is taken. Rows appended as
    anomalies are kept whole, up to a number that no healthy run reaches.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._stride = 1
        self._count = 0
        self._rows: list[tuple[int, Row]] = []
        self._anomalies: list[tuple[int, Row]] = []

    def __len__(self) -> int:
        return len(self._rows) + len(self._anomalies)

    @property
    def count(self) -> int:
        """Rows appended in all."""
        return self._count

    @property
    def stride(self) -> int:
        """Of how many ordinary rows one is held."""
        return self._stride

    def append(self, row: Row, *, anomaly: bool = False) -> None:
        number = self._count
        self._count += 1
        if anomaly and len(self._anomalies) < _ANOMALIES:
            self._anomalies.append((number, row))
        elif number % self._stride == 0:
            self._rows.append((number, row))
            while len(self._rows) > self._width:
                self._stride *= 2
                self._rows = [r for r in self._rows if r[0] % self._stride == 0]

    def wants(self) -> bool:
        """Whether the next ordinary row would be held: what is costly to make need not be made otherwise."""
        return self._count % self._stride == 0

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """(number, row) in the order of appending."""
        return iter(sorted([*self._rows, *self._anomalies], key=lambda r: r[0]))
