"""halfstep makes every optimizer update of a PyTorch run exactly the one its author meant."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.engine.group import tokens as tokens
    from halfstep.engine.manager import MixedPrecisionManager as MixedPrecisionManager
    from halfstep.engine.update import Update as Update
    from halfstep.probe.preflight.checklist import Preflight as Preflight
    from halfstep.probe.preflight.preflight import preflight as preflight

# Names are imported when they are asked for: `halfstep report` and `halfstep explain` start without torch.
_PLACES = {
    "ForeignGradients": "halfstep.errors",
    "GroupError": "halfstep.errors",
    "HalfstepError": "halfstep.errors",
    "MisuseError": "halfstep.errors",
    "MixedPrecisionManager": "halfstep.engine.manager",
    "NonFiniteError": "halfstep.errors",
    "PolicyError": "halfstep.errors",
    "Preflight": "halfstep.probe.preflight.checklist",
    "RecordError": "halfstep.errors",
    "ReplicaLostError": "halfstep.errors",
    "ScaleFloorError": "halfstep.errors",
    "UnsupportedError": "halfstep.errors",
    "Update": "halfstep.engine.update",
    "WeightError": "halfstep.errors",
    "assert_same_update": "halfstep.probe.same_update",
    "compare": "halfstep.probe.micro_batch.compare",
    "preflight": "halfstep.probe.preflight.preflight",
    "tokens": "halfstep.engine.group",
}

__all__ = sorted([*_PLACES, "watch"])


def __getattr__(name: str) -> Any:
    if name == "watch":  # a package that can be called
        return importlib.import_module("halfstep.watch")
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | set(__all__))
