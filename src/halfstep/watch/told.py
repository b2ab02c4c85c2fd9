"""What is certain is told at once, not only in the report after days."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from halfstep.checks.folding import CONSEQUENCES
from halfstep.checks.registry import cross_checks
from halfstep.events import Finding

_PATIENCE = 10.0  # seconds: what is certain in a shorter run is told in its report only


class Teller:
    """Writes error findings to stderr as they become certain. ``rank``: asked for this process's; only the first tells,
    and nothing that a comparison of ranks may still explain."""

    def __init__(self, rank: Callable[[], int | None] = lambda: None) -> None:
        self._rank = rank
        self._began = time.monotonic()
        self._open: frozenset[str] | None = None

    def __call__(self, finding: Finding) -> None:
        rank = self._rank()
        if time.monotonic() - self._began < _PATIENCE or rank:
            return
        if rank is not None and finding.rule in self._explainable():
            return
        where = f" {finding.at.file}:{finding.at.line}" if finding.at else ""
        print(f"halfstep: {finding.severity} {finding.rule}{where}: {finding.message}", file=sys.stderr)

    def _explainable(self) -> frozenset[str]:
        if self._open is None:
            rules = [rule for check in cross_checks() for rule in check.rules]
            self._open = frozenset().union(*(CONSEQUENCES.get(rule, frozenset()) for rule in rules))
        return self._open
