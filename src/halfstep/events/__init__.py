"""The language all speak: what a run did (events) and what is wrong with it (findings).

Events are frozen, plain and versioned: numbers, strings and tuples of them, no tensors, so that a record can be
judged and drawn anywhere. The watch and the engine write them, ``record`` keeps them, ``checks`` judge them.
A value that was not known when the event happened (it was still on the device) is read late, before the event is
released; ``None`` always means "not observed", never zero.
"""

from __future__ import annotations

from halfstep.events.base import (
    SCHEMA,
    Event,
    Outcome,
    Place,
    Severity,
)
from halfstep.events.beside import (
    UpdateTraced,
)
from halfstep.events.contributions import (
    BatchStatistics,
    Clipped,
    Contribution,
    Division,
    GradientsCleared,
    GradientsEdited,
    GradientsRead,
    GradientsTaken,
    HalfSums,
    LossRead,
    Share,
)
from halfstep.events.findings import (
    Finding,
)
from halfstep.events.lines import (
    decode,
    encode,
    flat,
    restored,
)
from halfstep.events.numbers import (
    GradientsMeasured,
    LayerGradient,
    NonFinite,
    PositionsCollided,
    ProbabilitiesSaturated,
    StatisticsPoisoned,
    TotalStalled,
)
from halfstep.events.plain import (
    plain,
)
from halfstep.events.regions import (
    AutocastEntered,
    AutocastLeft,
    AutocastLost,
    BackwardCompiled,
    BackwardDowncast,
    FunctionFailed,
    HalfInOffRegion,
    ModuleCalled,
    ModuleSeen,
    Recomputed,
    StaleCasts,
    SwitchedOff,
)
from halfstep.events.replicas import (
    ExamplesSeen,
    Exchanged,
    GroupMade,
    ParametersMarked,
    ReplicaBackward,
    ReplicasMade,
)
from halfstep.events.run import (
    Ended,
    Fault,
    HalfParameters,
    OptimizerMade,
    Raised,
    ScalerMade,
    SchedulerMade,
    Started,
    StateLoaded,
    StateSaved,
)
from halfstep.events.updates import (
    Attempt,
    HalfUpdate,
    ParametersChanged,
    PenaltyMixed,
    Refused,
    ScaleRead,
    ScaleUpdated,
    SchedulerStepped,
    Unscaled,
)
from halfstep.events.weights import (
    AverageUpdated,
    FrozenMoved,
    GraphsKept,
    MomentSampled,
    OrderPassed,
    ParametersSampled,
)

__all__ = [
    "SCHEMA",
    "Attempt",
    "AutocastEntered",
    "AutocastLeft",
    "AutocastLost",
    "AverageUpdated",
    "BackwardCompiled",
    "BackwardDowncast",
    "BatchStatistics",
    "Clipped",
    "Contribution",
    "Division",
    "Ended",
    "Event",
    "ExamplesSeen",
    "Exchanged",
    "Fault",
    "Finding",
    "FrozenMoved",
    "FunctionFailed",
    "GradientsCleared",
    "GradientsEdited",
    "GradientsMeasured",
    "GradientsRead",
    "GradientsTaken",
    "GraphsKept",
    "GroupMade",
    "HalfInOffRegion",
    "HalfParameters",
    "HalfSums",
    "HalfUpdate",
    "LayerGradient",
    "LossRead",
    "ModuleCalled",
    "ModuleSeen",
    "MomentSampled",
    "NonFinite",
    "OptimizerMade",
    "OrderPassed",
    "Outcome",
    "ParametersChanged",
    "ParametersMarked",
    "ParametersSampled",
    "PenaltyMixed",
    "Place",
    "PositionsCollided",
    "ProbabilitiesSaturated",
    "Raised",
    "Recomputed",
    "Refused",
    "ReplicaBackward",
    "ReplicasMade",
    "ScaleRead",
    "ScaleUpdated",
    "ScalerMade",
    "SchedulerMade",
    "SchedulerStepped",
    "Severity",
    "Share",
    "StaleCasts",
    "Started",
    "StateLoaded",
    "StateSaved",
    "StatisticsPoisoned",
    "SwitchedOff",
    "TotalStalled",
    "Unscaled",
    "UpdateTraced",
    "decode",
    "encode",
    "flat",
    "plain",
    "restored",
]
