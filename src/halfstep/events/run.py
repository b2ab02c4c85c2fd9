"""The run itself: begun, ended, failed; what was made, loaded and saved in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.events.base import Event, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    argv: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    pid: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Event):
    """The exception that ended the script; `frames` innermost last, the user's own only. ``in_backward``: torch's
    autograd engine was running."""

    type: str
    message: str
    frames: tuple[Place, ...] = ()
    in_backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    code: int | str | None = 0
    by: str = "script"
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Event):
    """A failure inside halfstep itself; the run goes on, what this hook would have seen is missing."""

    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerMade(Event):
    scaler: int
    scale: float
    enabled: bool = True
    device: str = ""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMade(Event):
    """`dtypes`: parameter dtype -> number of parameter tensors; `options`: the first group's plain settings."""

    optimizer: int
    type: str
    parameters: int
    elements: int
    dtypes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfParameters(Event):
    """An optimizer about to update parameters that are themselves in half precision; ``at``: where they became so.

    ``dtypes``: half dtype -> number of its parameter tensors that hold a gradient; ``name``: the first one's.
    """

    optimizer: int
    dtypes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    name: str | None = None
    used_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerMade(Event):
    """`length`: the calls after which the schedule has run its course, where it has such a number.

    ``overrun``: what further calls do: the rate "rises" again, "stays" at its end, or the call "raises".
    """

    scheduler: int
    optimizer: int | None
    type: str
    length: int | None = None
    per_metric: bool = False
    overrun: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoaded(Event):
    """`load_state_dict` of a module, optimizer, scaler or scheduler, or a file read ("file with optimizer").

    ``states``: parameter tensors for which an optimizer holds state after it. ``numbers``: plain floats in the file.
    """

    kind: str
    ident: int | None = None
    states: int | None = None
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved(Event):
    """`torch.save`; `has` names what was found in it ("module", "optimizer", "scaler", "scheduler")."""

    has: tuple[str, ...] = ()
