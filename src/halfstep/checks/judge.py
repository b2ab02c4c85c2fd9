"""The judge: runs every check over the events, counts repeats, and folds consequences under their cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from halfstep.checks.folding import fold
from halfstep.checks.registry import BaseCheck, checks
from halfstep.checks.story import Story
from halfstep.events import Event, Fault, Finding, Place

_ORDER = {"error": 0, "warning": 1, "info": 2}
_SHOWN = 8


@dataclass(slots=True)
class Summary:
    """What ran and what was judged of it."""

    attempted: int = 0
    applied: int = 0
    skipped: int = 0
    empty: int = 0
    micro_batches: int = 0
    weighed: int = 0
    opaque: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    precisions: dict[str, int] = field(default_factory=dict)
    scale_path: list[tuple[int, float]] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "attempted": self.attempted,
            "applied": self.applied,
            "skipped": self.skipped,
            "empty": self.empty,
            "micro_batches": self.micro_batches,
            "judged": {
                "contributions": self.micro_batches,
                "weighed": self.weighed,
                "unweighed_at": self.opaque,
                "not_judged": self.not_judged,
            },
            "micro_batches_per_update": {str(k): v for k, v in self.sizes.items()},
            "precisions": self.precisions,
            "scale_path": [[n, s] for n, s in self.scale_path],
        }


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, then the earliest."""
    return tuple(sorted(findings, key=lambda f: (_ORDER[f.severity], f.update or 0)))


class Judge:
    """Feed it events in order with `see`, then `end`; ask for `findings` and `summary` at any time.

    ``tell`` is called once for each error finding (a rule at a line) when it is first certain.
    """

    def __init__(self, tell: Callable[[Finding], None] | None = None) -> None:
        self.story = Story()
        self.ended = False
        self._checks = checks()
        self._seers = [c for c in self._checks if type(c).see is not BaseCheck.see]
        self._updaters = [c for c in self._checks if type(c).updated is not BaseCheck.updated]
        self._tell = tell
        self._found: dict[tuple[Any, ...], Finding] = {}

    def see(self, event: Event) -> None:
        if isinstance(event, Fault):
            self._internal(event.where, event.message, event.at)
        for check in self._seers:
            try:
                for finding in check.see(event, self.story):
                    self._take(finding)
            except Exception as error:
                self.broken(f"{type(check).__name__}.see", error)
        update = self.story.tell(event)
        if update is not None:
            for check in self._updaters:
                try:
                    for finding in check.updated(update, self.story):
                        self._take(finding)
                except Exception as error:
                    self.broken(f"{type(check).__name__}.updated", error)

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        for check in self._checks:
            try:
                for finding in check.end(self.story):
                    self._take(finding)
            except Exception as error:
                self.broken(f"{type(check).__name__}.end", error)

    def findings(self) -> tuple[Finding, ...]:
        """What was found, consequences folded under their cause, the gravest first."""
        return ranked(fold(self.unfolded()))

    def unfolded(self) -> list[Finding]:
        """Everything that was found, what follows from a cause beside it."""
        return list(self._found.values())

    @property
    def summary(self) -> Summary:
        story = self.story
        main = max(story.scalers.values(), key=lambda s: s.updates, default=None)
        return Summary(
            attempted=story.attempted,
            applied=story.applied,
            skipped=story.skipped,
            empty=story.empty,
            micro_batches=story.micro_batches,
            weighed=story.weighed,
            opaque=dict(story.opaque.most_common(_SHOWN)),
            sizes=dict(sorted(story.sizes.items())),
            precisions=dict(story.precisions),
            scale_path=list(main.path) if main is not None else [],
        )

    def broken(self, where: str, error: BaseException) -> None:
        """A failure of our own becomes a finding about halfstep."""
        self._internal(where, f"{type(error).__name__}: {error}", None)

    def _internal(self, where: str, message: str, at: Place | None) -> None:
        self._take(
            Finding(
                rule="halfstep-internal",
                severity="info",
                at=at,
                message=f"halfstep itself failed in {where}: {message}; what it would have seen was not judged",
                evidence={"where": where},
                fix="please report this with the message above",
            )
        )

    def _take(self, finding: Finding) -> None:
        at = finding.at
        key: tuple[Any, ...] = (
            finding.rule,
            at.file if at else None,
            at.line if at else None,
            finding.module,
            finding.rank,
        )
        if finding.rule == "halfstep-internal":
            key = (*key, finding.evidence.get("where"))
        old = self._found.get(key)
        if old is not None:
            self._found[key] = dataclasses.replace(old, count=old.count + finding.count)
            return
        self._found[key] = finding
        if self._tell is not None and finding.severity == "error" and finding in fold(list(self._found.values())):
            self._tell(finding)
