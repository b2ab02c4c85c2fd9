"""Several ranks: who averages with whom, what each saw."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.events.base import Event, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMade(Event):
    """The default process group was initialised; ``where``: how its ranks found each other, alike on all of them."""

    rank: int
    world_size: int
    backend: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasMade(Event):
    """A module wrapped for data parallelism, or seen to be: ``how`` is "ddp", "fsdp" or "fsdp1".

    ``ranks``: those that hold a replica (empty: it cannot be told); ``averages``: the backend divides gradients by
    their number; ``hook``: name of a communication hook; ``unused``: "found" or "static" where parameters without
    gradient are provided for.
    """

    module: int
    how: str = "ddp"
    type: str = ""
    ranks: tuple[int, ...] = ()
    averages: bool = True
    hook: str | None = None
    unused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBackward(Event):
    """What a contribution meant to a module wrapped by DDP; told after it.

    ``reduced``: its gradients were averaged over ``ranks``, since its forward asked for that. ``forwards``: of the
    wrapper since the backward before, the last at ``forward_at``; ``forward_synced``, ``backward_synced``: whether it
    was outside `no_sync` then. ``bypassed_at``: where the wrapped module was called without its wrapper instead.
    ``missing``: names of parameters whose gradient the wrapper still waits for; ``missing_count``: how many.
    """

    contribution: int
    module: int
    optimizers: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    reduced: bool = True
    forwards: int = 0
    forward_at: Place | None = None
    forward_synced: bool = True
    backward_synced: bool = True
    bypassed_at: Place | None = None
    missing: tuple[str, ...] = ()
    missing_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged(Event):
    """A collective that the script (or a library) called itself, with ``times`` calls like it in a row.

    ``what``: "gradients" or "parameters" of the ``optimizers``, "buffer" (many numbers), "number" (a few, or integers).
    ``operator``: "all_reduce"...; ``op``: "sum", "avg"...; ``ranks``: of its group.
    """

    what: str
    operator: str
    op: str = ""
    ranks: tuple[int, ...] = ()
    optimizers: tuple[int, ...] = ()
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesSeen(Event):
    """Fingerprints of the examples that a root module was called on, for the contribution to come.

    ``rows``: one number an example, from its content alone; 0 for one of equal values. ``width``: numbers an example;
    ``integers``: they are whole. ``at``: where the loader was made, or the order drawn, or the call; ``source``: which
    of these ("loader", "order", "call"). ``sampler``: the loader's; ``repeats``: it draws with replacement.
    """

    contribution: int
    rows: tuple[int, ...] = ()
    width: int = 0
    integers: bool = False
    source: str = "call"
    sampler: str = ""
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersMarked(Event):
    """Two numbers that tell an optimizer's parameters from others: a fixed projection of them, and their norm.

    ``update``: attempts of the optimizer before it (0: at its first contribution).
    """

    optimizer: int
    update: int
    mark: float | None = None
    norm: float | None = None
