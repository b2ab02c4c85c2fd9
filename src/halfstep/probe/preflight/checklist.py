"""What a preflight came to: one row a check, one table, pass or fail with reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halfstep.errors import HalfstepError
from halfstep.events import plain

Verdict = Literal["pass", "note", "not judged", "fail"]
_WIDTH = 118


@dataclass(frozen=True)
class Row:
    """One check of a preflight."""

    check: str
    """"examples", "weights", "gradient", "update", "finite", "boundaries", "memory", "parameters", "activations",
    "layers", "islands" (where there are any); in a process group "replicas" and "exchange"."""
    verdict: Verdict
    """"pass"; "fail"; "note": right, but look at it; "not judged": could not be seen, ``seen`` says why."""
    seen: str
    """What was measured, with its numbers."""
    fix: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The same numbers, plain and JSON-able."""

    @property
    def passed(self) -> bool:
        return self.verdict != "fail"

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "verdict": self.verdict,
            "seen": self.seen,
            "fix": self.fix,
            "numbers": plain(dict(self.numbers)),
        }


def failed(check: str, error: HalfstepError) -> Row:
    """The row of a check that was ended by one of halfstep's own errors."""
    return Row(check, "fail", error.seen, error.fix)


def not_judged(check: str, why: str, fix: str = "") -> Row:
    return Row(check, "not judged", why, fix)


@dataclass(frozen=True)
class Rank:
    """What one rank of a process group found in its own share."""

    rank: int
    passed: bool
    failed: tuple[str, ...]
    """The checks that failed there."""
    numbers: Mapping[str, Any]
    """"examples", "weight", "micro_batches", "grad_norm", "scale", "state_bytes", "dtype"."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "passed": self.passed,
            "failed": list(self.failed),
            "numbers": plain(dict(self.numbers)),
        }


@dataclass(frozen=True)
class Preflight:
    """The result of :meth:`halfstep.MixedPrecisionManager.preflight`; ``print`` it for the table. True if passed."""

    rows: tuple[Row, ...]
    """One a check, as this process found it."""
    policy: str
    """The manager's settings, as words."""
    ranks: tuple[Rank, ...] = ()
    """One a rank where a process group is initialised; else empty."""

    @property
    def passed(self) -> bool:
        """Whether no check failed, here and on every other rank."""
        return all(row.passed for row in self.rows) and all(rank.passed for rank in self.ranks)

    def __bool__(self) -> bool:
        return self.passed

    def __getitem__(self, check: str) -> Row:
        """The row of a check, by its name."""
        for row in self.rows:
            if row.check == check:
                return row
        raise KeyError(check)

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    def as_dict(self) -> dict[str, Any]:
        """Plain and JSON-able; non-finite floats are the strings "inf", "-inf", "nan"."""
        return {
            "preflight": 1,
            "passed": self.passed,
            "policy": self.policy,
            "rows": [row.as_dict() for row in self.rows],
            "ranks": [rank.as_dict() for rank in self.ranks],
        }

    def __str__(self) -> str:
        lines = _wrapped(f"preflight {'passed' if self.passed else 'FAILED'} · ", self.policy)
        for rank in self.ranks:
            what = "passed" if rank.passed else f"FAILED: {', '.join(rank.failed)}"
            numbers = ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in rank.numbers.items())
            lines.append(f"  rank {rank.rank}   {what} · {numbers}")
        for row in self.rows:
            verdict = "FAIL" if row.verdict == "fail" else row.verdict
            lines += _wrapped(f"  {verdict:<11}{row.check:<13}", row.seen)
            if row.fix and row.verdict != "pass":
                lines += _wrapped(f"  {'':<11}{'':<13}", f"→ {row.fix}")
        return "\n".join(lines)

    @property
    def failed(self) -> tuple[str, ...]:
        """The checks that failed, those of other ranks with their rank."""
        names = [row.check for row in self.failures]
        names += [f"{check} on rank {rank.rank}" for rank in self.ranks for check in rank.failed if check not in names]
        return tuple(names)

    def __repr__(self) -> str:
        if self.passed:
            return f"Preflight(passed: {len(self.rows)} checks)"
        return f"Preflight(failed: {', '.join(self.failed)})"


def _wrapped(head: str, text: str) -> list[str]:
    lines: list[str] = []
    for part in text.split("\n"):
        lines += textwrap.wrap(part.strip(), _WIDTH - len(head), break_long_words=False, break_on_hyphens=False) or [""]
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def some(names: list[str], most: int = 4) -> str:
    """A few of these names, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
