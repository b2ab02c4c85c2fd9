"""One exception tree: every error says what was seen and what to do about it."""

from __future__ import annotations


class HalfstepError(Exception):
    """The root of halfstep's errors.

    ``seen`` is what was observed, with its numbers; ``fix`` is what to do. Both are in the message.
    Raising one changes no state: parameters, optimizer, scaler and schedule are as before the call.
    """

    def __init__(self, seen: str, fix: str = "") -> None:
        self.seen = seen
        self.fix = fix
        super().__init__(f"{seen}\n  fix: {fix}" if fix else seen)


class PolicyError(HalfstepError, ValueError):
    """A setting that cannot be meant: an unknown precision, a size below 1, a string as a flag."""


class MisuseError(HalfstepError, RuntimeError):
    """The verbs in an order that cannot give the update that was meant."""


class GroupError(MisuseError):
    """A group of micro-batches left open, opened twice, or stepped before its end."""


class WeightError(HalfstepError, ValueError):
    """Weights that cannot be, or that disagree with what the loss itself divided by."""


class ForeignGradients(MisuseError):  # noqa: N818 - the design's name
    """Gradients that another optimizer's backward left on the parameters about to be updated."""


class UnsupportedError(HalfstepError, TypeError):
    """Something halfstep cannot make exact (a closure optimizer, FP16 parameters), refused before harm."""


class NonFiniteError(HalfstepError, ArithmeticError):
    """A non-finite gradient, loss or checked tensor where the policy is to raise."""


class ScaleFloorError(NonFiniteError):
    """The loss scale touched its floor again and again: lowering it further cannot help."""


class ReplicaLostError(HalfstepError, RuntimeError):
    """Another rank has ended, or did not come within the process group's timeout."""


class UpdateDiffersError(HalfstepError, AssertionError):
    """An accumulated gradient that is not the big batch's, or an update that is not the one it is held against."""


class RecordError(HalfstepError, OSError):
    """A run record that cannot be written or read."""


def counted(number: int, noun: str) -> str:
    """ "1 contribution", "2 contributions", "2 micro-batches": for messages."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
