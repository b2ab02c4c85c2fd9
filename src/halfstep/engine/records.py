"""What a manager tells of itself (settings, norms, metrics, the record), how it is rehearsed, and how it is copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor

from halfstep.engine.account import report
from halfstep.engine.metrics import Metrics
from halfstep.engine.state import in_words, load, policy, save
from halfstep.errors import MisuseError

if TYPE_CHECKING:
    from halfstep import Preflight
    from halfstep.engine.account import Account
    from halfstep.engine.group import Weigher
    from halfstep.engine.journal import Journal
    from halfstep.engine.manager import MixedPrecisionManager
    from halfstep.engine.scale import LossScale
    from halfstep.engine.updater import Updater


class Records:
    """The part of :class:`~halfstep.engine.manager.MixedPrecisionManager` that changes no parameter.

    ``pickle``, ``copy.copy`` and ``copy.deepcopy`` give a manager of its own with the same settings and the state of
    ``state_dict()``, at an update boundary: counters, scale and its path, position, norms. Journal rows, metrics and
    what it knew of models and optimizers stay behind; attributes of a subclass are copied. Rows of the copy go where
    those of the manager go.
    """

    _settings: dict[str, Any]
    _built: frozenset[str]
    """The attributes of a manager as built: what else it has is a subclass's or the user's."""
    _updater: Updater
    _journal: Journal
    _account: Account
    scaler: LossScale

    @property
    def scale_history(self) -> list[dict[str, Any]]:
        """Every move of the loss scale: {"update": attempted updates then, "scale": from there on, "why"}."""
        self._updater.settle()
        return [dict(entry) for entry in self.scaler.history]

    @property
    def norm_percentiles(self) -> dict[str, float] | None:
        """Percentiles (p10, p50, p90, p95, p99) of the gradient norm over the last 1000 applied updates."""
        self._updater.settle()
        return self._journal.percentiles()

    @property
    def suggested_max_norm(self) -> float | None:
        """The 90th percentile of those norms: a threshold that clips one update in ten. None before ten of them."""
        self._updater.settle()
        return self._journal.suggestion()

    def log(self, *unnamed: Any, **metrics: Any) -> None:
        """Keep the user's own metrics, by name, against the number of applied updates.

        Numbers, texts, tensors and NumPy arrays of one element, or lists and dicts of them; anything else raises
        :class:`~halfstep.errors.PolicyError`. On an accelerator nothing is waited for: what is in tensors is read, and
        its row written, at the next update or when the record is asked for.
        """
        self._updater.log(Metrics(unnamed, metrics))

    def accept(self, reason: str) -> None:
        """A person's word that this run is accepted, with a reason: the record's last status."""
        self._account.accept(reason)

    def report(self) -> dict[str, Any]:
        """The final record, plain and JSON-able: see ``halfstep.report.run_page`` for a page of it."""
        self._updater.settle()
        self._updater.explain(alone=True)
        return report(_manager(self))

    def policy(self) -> dict[str, Any]:
        """Every setting in force, defaults included."""
        self._updater.settle()
        return policy(_manager(self))

    def __repr__(self) -> str:
        return f"MixedPrecisionManager({in_words(policy(_manager(self)))})"

    # --- before a long run ---

    def preflight(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        batches: Iterable[Any],
        *,
        weight: Weigher | str | int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        size: int | None = None,
        scheduler: Any = None,
        big: Any = None,
        ids: Weigher | str | int | None = None,
        tolerance: float | None = None,
    ) -> Preflight:
        """Rehearse one update each way (accumulated, and as one big batch) on a few micro-batches; print the result.

        ``loss_fn(model, batch)``, called inside ``context()``, returns the loss of one micro-batch. ``batches`` are
        those of one group, or of several of ``size`` each (at most 64 are taken). ``weight``, ``reduction`` and
        ``ids`` are those of ``groups``; ``big`` is the first group as one batch, where its parts cannot be joined along
        dimension 0; ``tolerance`` is that of :func:`halfstep.assert_same_update`. In a process group every rank runs
        its own share of one group, then all run one together: call it on all of them.

        Nothing changes: parameters, gradients, buffers, modes, optimizer, scheduler, random state, this manager (its
        record tells that a preflight was made). Meanwhile optimizer and scheduler are held twice, parameters and
        gradients up to five times; hooks on them run. Returns a :class:`halfstep.Preflight`, whose rows say what was
        checked; what ``loss_fn`` raises goes through.
        """
        import halfstep  # the front door: what tries things again lives a floor above the engine

        return halfstep.preflight(
            _manager(self), model, optimizer, loss_fn, batches, weight=weight, reduction=reduction, size=size,
            scheduler=scheduler, big=big, ids=ids, tolerance=tolerance,
        )  # fmt: skip

    # --- copies ---

    def __getstate__(self) -> dict[str, Any]:
        """What ``pickle`` keeps. Raises :class:`~halfstep.errors.MisuseError` where that cannot be."""
        state = self._copied()
        for name in ("replicas", "record"):
            try:
                pickle.dumps(state["settings"][name])
            except Exception as error:  # whatever a user's object raises when it is pickled
                raise MisuseError(
                    f"a manager with {name}={state['settings'][name]!r} cannot be pickled ({error})",
                    "build the manager in the new process, with that process's own, and hand it "
                    "manager.state_dict() for load_state_dict",
                ) from error
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        from halfstep.engine.manager import MixedPrecisionManager

        manager = _manager(self)
        MixedPrecisionManager.__init__(manager, **state["settings"])
        load(manager, state["state"], True)
        vars(self).update(state["own"])

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__setstate__(self._copied())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Settings are shared, not copied: a device, a process group, a function that rows are sent to.
        made = memo[id(self)] = type(self).__new__(type(self))
        state = self._copied()
        made.__setstate__(state | {"own": copy.deepcopy(state["own"], memo)})
        return made

    def _copied(self) -> dict[str, Any]:
        manager = _manager(self)
        self._updater.settle()
        if manager._order.group is not None and not manager.pending:
            raise MisuseError(
                "a manager was copied inside a group that has no contribution yet: the copy would not know the group",
                "copy or pickle it between groups, right after manager.step; manager.discard() drops the open group",
            )
        own = {name: value for name, value in vars(self).items() if name not in self._built}
        return {"settings": self._settings, "state": save(manager, False), "own": own}


def _manager(part: Any) -> MixedPrecisionManager:
    manager: MixedPrecisionManager = part
    return manager
