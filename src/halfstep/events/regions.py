"""Autocast regions, modules, recomputations, compiled backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.events.base import Event, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastEntered(Event):
    """``made_at``: where the context was made, if not where it was entered."""

    region: int
    device: str
    dtype: str
    enabled: bool
    depth: int = 1
    thread: int = 0
    made_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastLeft(Event):
    """``raised``: an exception left it."""

    region: int
    raised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedOff(Event):
    """An autocast region or a scaler ("autocast", "scaler") asked to be on that turned itself off when it was made."""

    what: str
    device: str
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastLost(Event):
    """A module trained by ``optimizers`` ran in a thread without autocast while another thread was inside a region.

    ``entered_at``, ``dtype``: that region's. ``at``: the call, or where the other thread waited for it.
    """

    type: str
    dtype: str
    thread: int = 0
    entered_at: Place | None = None
    optimizers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleCasts(Event):
    """A backward through half-precision copies of weights that were made before the weights changed.

    ``region``: the outermost region open, which keeps the copies, entered at ``entered_at``; ``casts``: how many;
    ``changed``: whether the weights differ from what was copied; ``backwards``: so many in this region by now.
    """

    region: int
    entered_at: Place | None = None
    casts: int = 0
    changed: bool | None = None
    backwards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardDowncast(Event):
    """Gradient operators of an FP32 forward that autocast ran in ``dtype``, since backward was called inside a region.

    ``operators``: how many; ``operator`` and ``node``: the first of them and its autograd node. ``second``: of a second
    derivative.
    """

    dtype: str
    operators: int
    operator: str = ""
    node: str = ""
    second: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfInOffRegion(Event):
    """An operator inside a region with autocast off that computed in ``dtype``: its input came so from outside.

    ``at``: the operator; ``entered_at``: the region.
    """

    operator: str
    dtype: str
    region: int
    entered_at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed(Event):
    """A checkpointed forward beside its recomputation in backward; ``at``: the call, or what recomputes by hand.

    ``by``: "checkpoint", "reentrant", or the name of a custom function. ``dtype`` and ``autocast`` (half dtype of the
    region, "off" without one) of the first forward, ``again_dtype`` and ``again_autocast`` of the recomputation.
    ``difference``: of the values computed again, relative to their size, the largest of ``tensors`` compared.
    ``drew``: what the first forward drew random numbers from ("default", "python", "numpy", "generator");
    ``drew_at``: where, for a generator of the script's own; ``preserves``: whether the default state is put back.
    ``changed``: an operator that ran again with other numbers than before (looked at).
    """

    by: str
    dtype: str = ""
    again_dtype: str = ""
    autocast: str = ""
    again_autocast: str = ""
    difference: float | None = None
    tensors: int = 0
    drew: tuple[str, ...] = ()
    drew_at: Place | None = None
    preserves: bool | None = None
    changed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFailed(Event):
    """The exception that ends the script came from a custom autograd function; told just before `Raised`.

    ``phase``: "forward" or "backward"; ``recomputing``: from a module that backward ran again; ``wrapped``: the
    function has `custom_fwd`.
    """

    function: str
    phase: str
    recomputing: bool = False
    wrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCompiled(Event):
    """A backward was compiled in which gradient operators of an FP32 forward compute in ``dtype``.

    ``at``: the first forward operator so treated; ``setting``: torch's `backward_pass_autocast`.
    """

    dtype: str
    operators: int
    operator: str = ""
    module: str | None = None
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSeen(Event):
    """A root module's first call. ``modal``: kinds of inner modules that act differently in training and evaluation,
    with their number; ``fresh``: its batch statistics have never seen a batch."""

    module: int
    type: str
    parameters: int = 0
    modal: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCalled(Event):
    """A root module's forward (one called by no other module).

    ``optimizers``: those that own some of its parameters. ``mode_at``: where its mode was last set. ``repeated``: on
    the very input of its call before. ``own``: called by code that means this mode (batch statistics renewed).
    """

    module: int
    type: str
    training: bool
    grad_enabled: bool
    autocast: str | None = None
    examples: int | None = None
    optimizers: tuple[int, ...] = ()
    thread: int = 0
    carried: bool = False
    mode_at: Place | None = None
    repeated: bool = False
    own: bool = False
