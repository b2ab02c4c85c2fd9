"""Who listens to the engine while it works. It tells what it does with gradients; it knows nobody who listens.

A scaler of torch's own is seen by its verbs. The engine's scale, its divisors and the updates it skips go past all of
them: here they are told. While nobody listens nothing is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Listener(Protocol):
    """Numbers are floats, or 0-dim tensors where they are still on a device; none may be changed."""

    def contributing(self, scaler: Any, *, undivided: bool) -> None:
        """Backwards on this thread are the engine's, until `contributed`. ``scaler``: whose scale they carry, or None
        where losses are not scaled. ``undivided``: the update has still to divide them by the group's weight."""

    def contributed(self) -> None: ...

    def attempting(self, optimizers: Sequence[Any]) -> None:
        """An update of these begins: what happens to their gradients until `attempted` or `refused` is the engine's."""

    def refused(self, optimizers: Sequence[Any]) -> None:
        """It came to nothing, by an exception."""

    def attempted(
        self, optimizers: Sequence[Any], *, scaler: Any, divisor: Any, empty: Any, moved: bool, schedule: str
    ) -> None:
        """It is over, gradients are cleared. ``scaler``: None where losses are not scaled. ``divisor``: what gradients
        were divided by, clipping apart. ``empty``: not 0.0 where nothing was supervised. ``moved``: whether the scale
        has been moved on. ``schedule``: the updates that schedules count, "applied", "attempted" or (user's) "calls";
        they move between this and `settled`."""

    def settled(self) -> None:
        """The attempt's books are closed: the run may be ended here."""

    def scale_set(self, scaler: Any) -> None:
        """The scale was set by hand."""


LISTENERS: list[Listener] = []
