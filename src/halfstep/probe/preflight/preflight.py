"""Before a long run: one update each way on a few micro-batches, and a table of what to expect of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor

from halfstep.engine.binding import optimizers_of
from halfstep.engine.manager import MixedPrecisionManager
from halfstep.engine.position import generators_of, random_state, restore_random_state
from halfstep.engine.state import in_words
from halfstep.probe.micro_batch.passes import unwatched
from halfstep.probe.preflight import exchange, judgement, ranks
from halfstep.probe.preflight.checklist import Preflight, Rank, Row
from halfstep.probe.preflight.examples import fingerprints
from halfstep.probe.preflight.flight import Flight


def preflight(
    manager: MixedPrecisionManager,
    model: Any,
    optimizer: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    weight: Any = None,
    reduction: Literal["mean", "sum"] = "mean",
    size: int | None = None,
    scheduler: Any = None,
    big: Any = None,
    ids: Any = None,
    tolerance: float | None = None,
) -> Preflight:
    """See :meth:`halfstep.MixedPrecisionManager.preflight`."""
    state = random_state()
    own = [(generator, generator.get_state()) for generator in generators_of(batches)]
    others: tuple[Rank, ...] = ()
    together = ranks.several() and manager._settings["replicas"] != 1
    gathered = False
    try:
        flight = Flight(manager, model, loss_fn, batches, weight=weight, reduction=reduction, size=size, ids=ids)
        with unwatched():
            flight.run(optimizers_of(optimizer), scheduler, big, tolerance)
            rows = judgement.rows(flight, big)
        if together:
            share, gathered = _share(flight, rows), True
            shares = ranks.gather(share)
            rows += [ranks.row(shares), exchange.row(flight, shares)]
            others = ranks.ranks(shares)
    except BaseException as error:
        if together and not gathered and not isinstance(error, KeyboardInterrupt):
            ranks.gather(ranks.Share(False, (f"{type(error).__name__}: {error}",), {}, "", (), False))
        raise
    finally:
        restore_random_state(state)
        for generator, value in own:
            generator.set_state(value)
        manager._order.witnesses.after()  # backward passes ran, and left nothing
    result = Preflight(tuple(rows), in_words(manager.policy()), others)
    manager._account.prepare(result.failed)
    return result


def _share(flight: Flight, rows: list[Row]) -> ranks.Share:
    """What this rank tells the others of its first group."""
    update, group = flight.found.first, flight.group
    applied = update is not None and update.applied
    numbers = {
        "micro_batches": len(group),
        "examples": rows[0].numbers.get("examples_of_group"),
        "weight": update.weight if update is not None else None,
        "grad_norm": update.grad_norm if update is not None and applied else None,
        "scale": flight.scale,
        "state_bytes": flight.found.state_bytes,
    }
    compared = flight.same_update
    if compared is not None and applied:
        numbers["dtype"] = str(compared.dtype).removeprefix("torch.")
    told = flight.example_ids() if flight.ids is not None else [fingerprints(batch) for batch in group]
    examples = tuple(entry for entries in told[: len(group)] for entry in entries)
    failures = tuple(row.check for row in rows if not row.passed)
    return ranks.Share(not failures, failures, numbers, ranks.digest(flight.module), examples, flight.ids is not None)
