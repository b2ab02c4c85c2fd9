"""Replicas as one rank sees them: gradients that its wrapper does not reduce, reduces too often, or waits for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from halfstep.checks.registry import BaseCheck
from halfstep.checks.replicas.agreement import ParametersDiffer, ScalesAndSkipsDiffer
from halfstep.checks.replicas.examples import DuplicateExamples
from halfstep.checks.replicas.ranks import CrossCheck
from halfstep.checks.replicas.weights import WeightsAcrossReplicas
from halfstep.checks.story import Story, Update
from halfstep.events import Event, Exchanged, Finding, Raised, ReplicaBackward, ReplicasMade

_KEPT = 512
_UNFINISHED = "Expected to have finished reduction in the prior iteration"


class NoSyncWithoutForward(BaseCheck):
    """A forward outside `no_sync` made DDP ready to reduce; the region around the backward alone changes nothing."""

    rules = ("no-sync-without-forward",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, ReplicaBackward) and event.forwards and event.forward_synced and not event.backward_synced:
            yield Finding(
                rule="no-sync-without-forward",
                severity="warning",
                at=event.forward_at or event.at,
                message=(
                    f"no_sync covered the backward of micro-batch {event.contribution} but not its forward: DDP "
                    f"decides in forward, so gradients were reduced over {len(event.ranks)} ranks all the same"
                ),
                evidence={"ranks": len(event.ranks), "backward": event.at.line if event.at else None},
                fix="with model.no_sync():\n    loss = loss_fn(model(x), y)\n    loss.backward()",
            )


class ReplicaBypassed(BaseCheck):
    """Contributions through the module inside the wrapper, used by an update, with nothing that combined them."""

    rules = ("replica-bypassed",)

    def __init__(self) -> None:
        self._bypassed: OrderedDict[int, ReplicaBackward] = OrderedDict()
        self._exchanged = 0  # number of the last collective on many numbers

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, ReplicaBackward) and event.bypassed_at is not None and not event.forwards:
            self._bypassed[event.contribution] = event
            if len(self._bypassed) > _KEPT:
                self._bypassed.popitem(last=False)
        elif isinstance(event, Exchanged) and event.what in ("gradients", "buffer"):
            self._exchanged = event.seq
        return ()

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        found = [self._bypassed[c.number] for c in update.live if c.number in self._bypassed]
        found = [b for b in found if update.optimizer in b.optimizers and b.seq > self._exchanged]
        if not found or update.attempt.outcome != "applied":
            return
        first = found[0]
        yield Finding(
            rule="replica-bypassed",
            severity="error",
            at=first.bypassed_at,
            update=update.number,
            message=(
                f"the forward went through the module inside the wrapper: the gradients of {len(found)} of "
                f"{len(update.live)} micro-batches were not reduced over the {len(first.ranks)} ranks, each rank's "
                "update is its own"
            ),
            evidence={"micro_batches": len(update.live), "bypassed": len(found), "ranks": len(first.ranks)},
            fix="call the wrapper: model(x), not model.module(x)",
        )


class UnusedParameters(BaseCheck):
    """DDP waits for gradients that never come: torch raises in the next forward."""

    rules = ("unused-parameters",)

    def __init__(self) -> None:
        self._waiting: dict[int, ReplicaBackward] = {}  # module -> its last backward, not finished
        self._made: dict[int, ReplicasMade] = {}
        self._told = False

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, ReplicasMade):
            self._made[event.module] = event
        elif isinstance(event, ReplicaBackward):
            if event.missing_count:
                self._waiting[event.module] = event
            else:
                self._waiting.pop(event.module, None)
        elif isinstance(event, Raised) and self._made and _UNFINISHED in event.message and not self._told:
            waiting = next(iter(self._waiting.values()), None)
            yield self._finding(waiting, event, None)

    def updated(self, update: Update, story: Story) -> Iterable[Finding]:
        for waiting in self._waiting.values():
            if update.optimizer in waiting.optimizers:
                yield self._finding(waiting, None, update.number)

    def _finding(self, waiting: ReplicaBackward | None, raised: Raised | None, update: int | None) -> Finding:
        self._told = True
        missing, count = (waiting.missing, waiting.missing_count) if waiting is not None else ((), 0)
        names = ", ".join(missing) or "some parameters"
        more = f" and {count - len(missing)} more" if count > len(missing) else ""
        at = waiting.forward_at if waiting is not None else None
        made = self._made.get(waiting.module) if waiting is not None else None
        static = made is not None and made.unused == "static"
        promise = " (static_graph=True promises that the same ones get gradients every time)" if static else ""
        return Finding(
            rule="unused-parameters",
            severity="error",
            at=at or (raised.at if raised is not None else None),
            update=update,
            message=(
                f"{names}{more} got no gradient in this backward{promise}: DDP waits for them, reduces nothing that "
                "shares their buckets, and raises in the next forward (Expected to have finished reduction)"
            ),
            evidence={"parameters": list(missing), "count": count},
            fix=(
                "DDP(model, find_unused_parameters=True) without static_graph"
                if static
                else "DDP(model, find_unused_parameters=True)"
            )
            + ", or use what they compute in the loss, or remove them",
        )


REPLICAS: tuple[type[BaseCheck], ...] = (NoSyncWithoutForward, ReplicaBypassed, UnusedParameters)
ACROSS: tuple[type[CrossCheck], ...] = (
    WeightsAcrossReplicas,
    ScalesAndSkipsDiffer,
    ParametersDiffer,
    DuplicateExamples,
)
