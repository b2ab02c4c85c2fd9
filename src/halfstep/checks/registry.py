"""All checks: our own families, and those that other packages add by the entry point ``halfstep.checks``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar, Protocol

from halfstep.checks.story import Story, Update
from halfstep.events import Event, Finding

if TYPE_CHECKING:
    from halfstep.checks.replicas.ranks import CrossCheck


class Check(Protocol):
    """Judges one rule, or a few that rest on the same observation.

    ``see`` is called with every event *before* the story has folded it; ``updated`` after an attempt, with all that
    went into it; ``end`` once, when the run is over. Each returns findings; the judge counts repeats of the same rule
    at the same line. A check keeps its own state, reads nothing but events and the story, and costs O(1) an event.
    """

    rules: ClassVar[tuple[str, ...]]

    def see(self, event: Event, story: Story) -> Iterable[Finding]: ...

    def updated(self, update: Update, story: Story) -> Iterable[Finding]: ...

    def end(self, story: Story) -> Iterable[Finding]: ...


class BaseCheck:
    """A check that sees nothing; families override what they need."""

    rules: ClassVar[tuple[str, ...]] = ()

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        return ()

    def end(self, story: Story) -> Iterable[Finding]:
        return ()


def checks() -> list[Check]:
    """A fresh instance of every check, for one run."""
    from halfstep.checks import families

    found: list[Check] = [kind() for kind in families.CHECKS]
    for point in entry_points(group="halfstep.checks"):
        found.append(point.load()())
    return found


def cross_checks() -> list[CrossCheck]:
    """A fresh instance of every check that compares ranks, for one group of them."""
    from halfstep.checks import families

    return [kind() for kind in families.CROSS_CHECKS]


def rules() -> tuple[str, ...]:
    """The names of all rules that some check judges, sorted."""
    own = {rule for check in checks() for rule in check.rules}
    return tuple(sorted(own | {rule for check in cross_checks() for rule in check.rules}))
