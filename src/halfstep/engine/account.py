"""The account of a run: its counters and, at the end, its record as one plain object."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from halfstep.engine.graph import Sight
from halfstep.engine.journal import FIELDS
from halfstep.engine.precision import HALVES
from halfstep.errors import PolicyError
from halfstep.events import plain

if TYPE_CHECKING:
    from halfstep.engine.manager import MixedPrecisionManager

RECORD = 1  # version of the record's layout


class Account:
    """Counters of one manager, and what is only known at moments: last groups, islands, checks, a person's word."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.attempted = 0
        self.applied = 0
        self.skipped = 0
        self.empty = 0
        self.micro_batches = 0
        self.examples: int | None = 0
        self.weight: float | None = 0.0
        self.last_groups: deque[dict[str, Any]] = deque(maxlen=16)
        self.kept_groups = 0
        self.dropped_groups = 0
        self.group_sizes: dict[int, int] = {}
        self.example_sizes: dict[int, int] = {}
        self.update_sizes: dict[int, int] = {}
        self.accepted: dict[str, Any] | None = None
        self.prepared: deque[dict[str, Any]] = deque(maxlen=16)

    def last_group(
        self, *, kept: bool, micro_batches: int, size: int, examples: int | None, ids: list[Any] | None
    ) -> None:
        """A short last group, kept with its own denominator or dropped."""
        self.kept_groups += kept
        self.dropped_groups += not kept
        self.last_groups.append(
            {"kept": kept, "micro_batches": micro_batches, "size": size, "examples": examples, "ids": ids}
        )

    def accept(self, reason: str) -> None:
        """A person's word, with a reason."""
        if not reason or not isinstance(reason, str):
            raise PolicyError(f"accept was given the reason {reason!r}", "say in words why the run is accepted")
        self.accepted = {"reason": reason, "applied_updates": self.applied}

    def prepare(self, failed: Sequence[str]) -> None:
        """A preflight was made; ``failed``: the checks that did not pass."""
        self.prepared.append({"passed": not failed, "failed": list(failed), "applied_updates": self.applied})

    def counters(self) -> dict[str, Any]:
        return {
            "attempted": self.attempted,
            "applied": self.applied,
            "skipped": self.skipped,
            "empty": self.empty,
            "micro_batches": self.micro_batches,
            "examples": self.examples,
            "weight": self.weight,
        }

    def load(self, counters: dict[str, Any]) -> None:
        for name in ("attempted", "applied", "skipped", "empty", "micro_batches", "examples", "weight"):
            setattr(self, name, counters[name])

    def add_examples(self, micro_batches: int, examples: int | None, everywhere: int | None) -> None:
        """Keep how large groups are: A, the examples of this replica, and of all."""
        self.group_sizes[micro_batches] = self.group_sizes.get(micro_batches, 0) + 1
        if examples is None or everywhere is None:
            self.examples = None
            return
        self.update_sizes[everywhere] = self.update_sizes.get(everywhere, 0) + 1
        self.example_sizes[examples] = self.example_sizes.get(examples, 0) + 1
        if self.examples is not None:
            self.examples += everywhere

    def add_weight(self, weight: float | None) -> None:
        self.weight = None if weight is None or self.weight is None else self.weight + weight


def report(manager: MixedPrecisionManager) -> dict[str, Any]:
    """The final record: plain, strict JSON (non-finite floats are the strings "inf", "-inf", "nan").

    ``None`` means not known. Numbers are counted or measured; what is computed, or was not observed, says so.
    """
    account, journal = manager._account, manager._journal
    replicas = manager.replicas.describe()
    size = _commonest(account.group_sizes)
    examples = _usual(account.example_sizes)
    everywhere = sorted(account.update_sizes)
    status = "prepared" if account.applied == 0 else "tried"
    record = {
        "record": RECORD,
        "status": "accepted" if account.accepted else status,
        "accepted": account.accepted,
        "preflights": list(account.prepared),
        "policy": manager.policy(),
        "batch": {
            "m": None if examples is None or not size or examples % size else examples // size,
            "A": size,
            **replicas,
            "examples_per_update": _usual(account.update_sizes),
            "examples_range": [everywhere[0], everywhere[-1]] if everywhere else None,
            "how": "counted: the commonest group of this replica, and the examples of most updates, null where they "
            "are ragged; m is computed",
            "group_sizes": {str(k): v for k, v in sorted(account.group_sizes.items())},
            "examples_seen": account.examples,
            "supervised_elements": account.weight,
        },
        "counters": account.counters(),
        "examples": manager._identities.describe(),
        "precision": _precision(manager),
        "normalisation": _normalisation(manager),
        "last_group": {
            "kept": account.kept_groups,
            "dropped": account.dropped_groups,
            "groups": list(account.last_groups),
        },
        "loss_scale": {
            "enabled": manager.scaler.is_enabled(),
            "now": manager.scaler.value,
            "path": list(manager.scaler.history),
        },
        "norm": {
            "percentiles": journal.percentiles(),
            "over": "the last applied updates, at most 1000",
            "max_norm": manager.max_norm,
            "suggested_max_norm": manager.suggested_max_norm,
        },
        "memory": memory(),
        "operators": _operators(manager._contributor.sight),
        "updates": [dict(zip(FIELDS, row, strict=True)) for row in journal.thinned()],
        "metrics": list(journal.metrics),
        "checks": [check.describe() for check in manager._checks],
        "notes": [dict(note) for note in journal.notes],
        "position": {"epoch": manager._position.epoch, "micro_batches": manager._position.micro_batches},
        "wall_seconds": {"value": time.perf_counter() - account.began, "how": "measured, since the manager was made"},
        "versions": versions(),
        "seeds": {"torch": torch.initial_seed(), "how": "read: torch.initial_seed(); others are not known"},
    }
    return {name: plain(value) for name, value in record.items()}


def _commonest(counts: dict[int, int]) -> int | None:
    return max(counts, key=lambda size: (counts[size], size)) if counts else None


def _usual(counts: dict[int, int]) -> int | None:
    """The size that most have; None where they are ragged."""
    size = _commonest(counts)
    return size if size is not None and 2 * counts[size] > sum(counts.values()) else None


def _precision(manager: MixedPrecisionManager) -> dict[str, Any]:
    precision = manager.precision
    dtypes = sorted({dtype for binding in manager._bindings for dtype in binding.dtypes})
    half = sum(binding.half_parameters for binding in manager._bindings)
    if not dtypes:
        master = "not observed: no update yet"
    elif half:
        master = f"none for {half} BF16 parameters: an update smaller than 1/256 of a weight rounds away"
    else:
        master = "the parameters themselves; autocast's half copies are passing, checkpoints do not shrink"
    used, autocast = precision.name, "none"
    sight = manager._contributor.sight
    if precision.dtype is not None and precision.entered:
        autocast = "manager.context() was entered"
    elif precision.dtype is not None and sight is None:
        autocast = "not observed: no backward yet"
    elif precision.dtype is not None:
        halves = sorted({dtype for _, dtype in sight.operators if dtype in HALVES}) if sight is not None else []
        autocast = "manager.context() was never entered" + (f"; {', '.join(halves)} was seen to run" if halves else "")
        opaque = sight is not None and bool(sight.opaque)
        used = used if halves or opaque or sight is None else "fp32"
    return {
        "declared": precision.declared,
        "activated": precision.activated,
        "used": used,
        "autocast": autocast,
        "device": precision.device_type,
        "parameters": dtypes,
        "master_weights": master,
        "kept_in_fp32": [name for islands in manager._islands for name in islands],
    }


def _normalisation(manager: MixedPrecisionManager) -> dict[str, Any]:
    verification = manager._verification
    why = manager._contributor.counted_examples
    return {
        "weights": dict(manager._sources) or "not observed: no update yet",
        "counted_examples_instead": why,
        "verdict": "unverified" if why is not None else verification.verdict or "unverified",
        "weighed_contributions": verification.weighed,
        "looked_at_contributions": verification.contributions,
        "looked_at_updates": verification.updates,
        "opaque": dict(verification.opaque),
        "how": "weighed at updates 1, 2, 4, 8, …",
    }


def _operators(sight: Sight | None) -> dict[str, Any]:
    if sight is None:
        return {"observed": "not observed: no backward yet", "dtypes": {}}
    dtypes: dict[str, dict[str, int]] = {}
    for (operator, dtype), count in sorted(sight.operators.items()):
        dtypes.setdefault(operator, {})[dtype] = count
    inside = sorted(sight.opaque)
    return {
        "observed": "in the first micro-batch: operators that are differentiated, dtype of their output",
        "not_observed": f"what runs inside {', '.join(inside)}" if inside else None,
        "dtypes": dtypes,
    }


def memory() -> dict[str, Any]:
    """Peak memory by device, measured: allocated by torch on an accelerator, resident on the CPU."""
    peaks: dict[str, Any] = {
        "cpu": {"peak_bytes": peak_resident(), "how": "measured: peak resident size of the process"}
    }
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            kind = torch.accelerator.current_accelerator()
            try:
                peak = torch.accelerator.max_memory_allocated(index)
            except (RuntimeError, AttributeError):
                continue
            peaks[f"{kind.type if kind else 'accelerator'}:{index}"] = {
                "peak_bytes": peak,
                "how": "measured: peak allocated by torch",
            }
    return peaks


def peak_resident() -> int | None:
    """The process's peak resident size in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("halfstep")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "halfstep": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
