"""One cause, one finding: what follows from a fault is not told beside it.

``CONSEQUENCES`` names, for each rule, the rules whose findings it explains; they are left out where it was found.
The more specific of two rules that fit stands on the left.
"""

from __future__ import annotations

from halfstep.events import Finding

CONSEQUENCES: dict[str, frozenset[str]] = {
    "unscale-mid-group": frozenset({"scaler-update-mid-group"}),
    "partial-group-underweighted": frozenset({"mean-of-means"}),
}


def fold(findings: list[Finding]) -> list[Finding]:
    """The findings without those that another of them explains."""
    present = {f.rule for f in findings}
    explained = {rule for cause in present for rule in CONSEQUENCES.get(cause, frozenset()) if rule != cause}
    return [f for f in findings if f.rule not in explained]
