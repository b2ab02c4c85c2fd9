"""What a new process needs to continue bit for bit, and every setting in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfstep.engine.journal import rank
from halfstep.engine.position import random_state as random_state_now
from halfstep.engine.position import restore_random_state
from halfstep.errors import MisuseError, PolicyError, counted

if TYPE_CHECKING:
    from halfstep.engine.manager import MixedPrecisionManager

VERSION = 2
_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
_COUNTERS = {"attempted", "applied", "skipped", "empty", "micro_batches", "examples", "weight"}
_POSITION = {"epoch", "micro_batches", "exhausted", "start", "now"}
_PARTS: dict[str, type[Any]] = {
    "version": int, "scaler": Mapping, "scale_history": Sequence, "scale_touches": int, "counters": Mapping,
    "position": Mapping, "norms": Sequence,
}  # fmt: skip
_FIX = "manager.load_state_dict(checkpoint['manager']) with what manager.state_dict() gave"


def save(manager: MixedPrecisionManager, random_state: bool) -> dict[str, Any]:
    """The state of a manager at an update boundary.

    Its keys are always the same, and what varies in shape is a tuple or a list of numbers: one leaf, for checkpoints
    that are loaded into a template (torch.distributed.checkpoint).
    """
    pending = manager.pending
    if pending:
        raise MisuseError(
            f"state_dict() with {counted(pending, 'contribution')} pending, in gradients, which no checkpoint holds",
            "save right after manager.step; in a flat loop, step the tail first (if manager.pending)",
        )
    state: dict[str, Any] = {
        "version": VERSION,
        "scaler": manager.scaler.full_state(),
        "rank": rank(),
        "scale_history": tuple(dict(entry) for entry in manager.scaler.history),
        "scale_touches": manager.scaler.touches,
        "counters": manager._account.counters(),
        "position": manager._position.state(),
        "reference": manager.replicas.scale or 0.0,
        "norms": manager._journal.window(),
    }
    if random_state:
        state["random_state"] = (random_state_now(),)
    return state


def load(manager: MixedPrecisionManager, state: dict[str, Any], position: bool) -> None:
    """Put a saved state, or a bare GradScaler's, into a manager."""
    if manager.pending:
        raise MisuseError(
            f"load_state_dict() with {counted(manager.pending, 'contribution')} pending",
            "load before the first backward, or after manager.discard()",
        )
    if not isinstance(state, Mapping):
        raise PolicyError(
            f"load_state_dict was given a {type(state).__name__}, no state",
            _FIX,
        )
    account, scaler = manager._account, manager.scaler
    if "counters" not in state and "version" not in state:
        if not state and not scaler.is_enabled():
            return  # a disabled GradScaler's, for a run that has no loss scale either
        if not state.keys() >= _SCALER:
            keys = f"its keys are {sorted(map(str, state))}" if state else "it is empty, as a disabled GradScaler's is"
            raise PolicyError(f"no state of a MixedPrecisionManager or a GradScaler: {keys}", _FIX)
        scaler.load_full_state(state, account.attempted)
        return
    _require_whole(state)
    if state["version"] > VERSION:
        raise PolicyError(
            f"the state has version {state['version']}, this halfstep reads up to {VERSION}",
            "load it with the halfstep that wrote it, or a newer one",
        )
    account.load(state["counters"])
    scaler.load_full_state(state["scaler"], account.attempted)
    scaler.restore_history(state["scale_history"], state["scale_touches"])
    if position:
        manager._position.load(state["position"])
    manager._journal.load_window(state["norms"])
    manager.replicas.scale = state.get("reference") or None
    if "random_state" in state:
        _restore_random_state(manager, state)


def _require_whole(state: Mapping[str, Any]) -> None:
    """Raise where part of a state is missing or is something else, before any of it is loaded."""
    for name, kind in _PARTS.items():
        if name not in state:
            raise PolicyError(f"the state of a manager has no {name!r}: it was cut, or put together by hand", _FIX)
        if not isinstance(state[name], kind) or isinstance(state[name], str):
            shown = f"{state[name]!r}, of type {type(state[name]).__name__}"[:160]
            raise PolicyError(f"the state has {name} = {shown}", _FIX)
    for name, keys in (("scaler", _SCALER), ("counters", _COUNTERS), ("position", _POSITION)):
        missing = sorted(keys - state[name].keys())
        if missing:
            raise PolicyError(f"the {name} of the state has no {', '.join(missing)}", _FIX)


def _restore_random_state(manager: MixedPrecisionManager, state: Mapping[str, Any]) -> None:
    """Each rank draws its own dropout masks: another rank's generators are not put in, and the record says so."""
    saved, own = state.get("rank", 0), rank()
    if saved != own:
        manager._journal.note(
            "random state not restored",
            f"the state was saved by rank {saved} and loaded on rank {own}: with its generators both would draw the "
            "same random numbers; save one state a rank to continue bit for bit",
        )
        return
    kept = state["random_state"]
    restore_random_state(kept[0] if isinstance(kept, (tuple, list)) else kept)


def policy(manager: MixedPrecisionManager) -> dict[str, Any]:
    """Every setting in force, defaults included."""
    scaler = manager.scaler
    scale = None
    if scaler.is_enabled():
        scale = {
            "scale": scaler.value,
            "dynamic": scaler.dynamic,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "min_scale": scaler.min_scale,
        }
    return {
        "activated": manager.activated,
        "precision": repr(manager.precision),
        "max_norm": manager.max_norm,
        "scheduler_unit": manager.scheduler_unit,
        "on_nonfinite": manager.on_nonfinite,
        "loss_scale": scale,
        "replicas": manager.replicas.describe(),
        "on_duplicate": manager.on_duplicate,
        "monitor": manager.monitor,
    }


def in_words(settings: dict[str, Any]) -> str:
    """The policy on one line."""
    parts = []
    for name, value in settings.items():
        shown = value
        if isinstance(value, dict):
            inner = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
            shown = f"({inner})"
        elif name == "loss_scale":
            shown = "none: only fp16 needs one"
        parts.append(f"{name}={shown}")
    return ", ".join(parts)
