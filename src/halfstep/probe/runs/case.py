"""All that a verdict rests on: two runs, further ones, and what was measured between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep.probe.runs.criterion import Criterion, Outcome, number
from halfstep.probe.runs.pair import Account
from halfstep.probe.runs.parting import Pair, Parting, Sameness

Blame = Literal["precision", "not precision", "unknown"]


@dataclass(slots=True)
class Case:
    """``outcome``: of one of the script's optimizers, where the criterion is of updates (``several``: it has more).

    ``scaled``: the script as it is beside FP32 with its scalers left on; ``jittered``: FP32 with random errors beside
    FP32; ``reached``: attempted updates of that run; ``repeated``: the first update of a further run, which is FP32
    too, and of FP32. ``wanted``: a further run that would decide.
    """

    criterion: Criterion
    own: Account
    fp32: Account
    matched: Sequence[Pair]
    dtype: str
    same: Sameness
    parted: Parting | None
    outcome: Outcome | None = None
    several: bool = False
    scaled: Outcome | None = None
    jittered: Outcome | None = None
    reached: int | None = None
    repeated: Pair | None = None
    wanted: str | None = None
    comparable: bool = True

    def ends(self) -> str:
        """Where both end, in words."""
        assert self.outcome is not None
        name = self.criterion.metric.replace("grad_norm", "gradient norm")
        if self.several:
            name += f" of optimizer {self.outcome.optimizer}"
        return f"{name} {number(self.outcome.own)} as it is, {number(self.outcome.fp32)} in FP32"


def attempted(account: Account) -> int:
    return account.points[-1].attempted if account.points else 0
