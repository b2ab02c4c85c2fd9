"""What is wrong with a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.events.base import Place, Severity
from halfstep.events.plain import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, with its place, its numbers and its cure; `count` is how often it was seen."""

    rule: str
    severity: Severity
    message: str
    at: Place | None = None
    update: int | None = None
    count: int = 1
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fix: str = ""
    module: str | None = None
    operator: str | None = None
    phase: str | None = None
    rank: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The finding as the `--json` document has it (design, section 4)."""
        out: dict[str, Any] = {
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "file": self.at.file if self.at else None,
            "line": self.at.line if self.at else None,
            "update": self.update,
            "count": self.count,
            "evidence": plain(dict(self.evidence)),
            "fix": self.fix,
        }
        for name in ("module", "operator", "phase", "rank"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out
