"""Modes: autocast regions that span updates, hold the backward, are lost in threads or stand on another device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from halfstep.checks.modes.checkpoints import CheckpointsAgree
from halfstep.checks.modes.exceptions import DtypesMet
from halfstep.checks.registry import BaseCheck
from halfstep.checks.story import Story
from halfstep.events import (
    Attempt,
    AutocastEntered,
    AutocastLost,
    BackwardCompiled,
    BackwardDowncast,
    Contribution,
    Event,
    Finding,
    HalfInOffRegion,
    Place,
    StaleCasts,
    SwitchedOff,
)


class AutocastAroundLoop(BaseCheck):
    """Backward went through half-precision copies of weights that had changed since: the region never ended."""

    rules = ("autocast-around-loop",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, StaleCasts) and event.changed:
            yield Finding(
                rule="autocast-around-loop",
                severity="error",
                at=event.entered_at or event.at,
                message=(
                    f"forward computed with {event.casts} half-precision copies of weights that had changed since they "
                    "were made: autocast keeps a copy until its outermost region ends, and the weights changed inside"
                ),
                evidence={"stale_copies": event.casts, "backwards_in_region": event.backwards},
                fix="enter autocast anew for each forward: with torch.autocast(...): loss = criterion(model(x), y)",
            )


class BackwardUnderAutocast(BaseCheck):
    """Backward inside a region: a warning where gradients of an FP32 forward were computed in half, else a word."""

    rules = ("backward-under-autocast",)

    def __init__(self) -> None:
        self._inside: Counter[Place | None] = Counter()
        self._loud: set[Place | None] = set()

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, Contribution) and event.inside_autocast:
            self._inside[event.at] += 1
        if isinstance(event, BackwardDowncast):
            self._loud.add(event.at)
            which = "a second derivative" if event.second else "backward"
            yield Finding(
                rule="backward-under-autocast",
                severity="warning",
                at=event.at,
                message=(
                    f"{which} ran inside an autocast region: {event.operators} gradient operators of a forward in "
                    f"float32 computed in {event.dtype} (the first: {event.operator} of {event.node})"
                ),
                evidence={"operators": event.operators, "dtype": event.dtype, "node": event.node},
                operator=event.operator,
                phase="backward",
                fix="end the region before backward: only forward and loss belong inside torch.autocast",
            )

    def end(self, story: Story) -> Iterable[Finding]:
        for at, count in self._inside.items():
            if at not in self._loud:
                yield Finding(
                    rule="backward-under-autocast",
                    severity="info",
                    at=at,
                    message="backward ran inside an autocast region; nothing it computed changed dtype here",
                    count=count,
                    evidence={"backwards": count},
                    fix="end the region before backward: only forward and loss belong inside torch.autocast",
                )


class OffRegionComputesInHalf(BaseCheck):
    """Autocast was switched off for an operator's sake, and its input came in half precision all the same."""

    rules = ("autocast-off-needs-float",)

    def __init__(self) -> None:
        self._first: dict[Place | None, HalfInOffRegion] = {}

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, HalfInOffRegion):
            first = self._first.setdefault(event.entered_at, event)  # a region's later operators follow from it
            if event.at == first.at:
                yield Finding(
                    rule="autocast-off-needs-float",
                    severity="warning",
                    at=event.at,
                    message=(
                        f"{event.operator.strip('_')} computed in {event.dtype} inside a region with autocast off: "
                        "switching it off casts nothing, and the input came so from the region around it"
                    ),
                    evidence={"dtype": event.dtype, "region": event.entered_at.line if event.entered_at else None},
                    operator=event.operator,
                    fix="cast what enters the region: x.float()",
                )


class AutocastLostInThread(BaseCheck):
    """A forward in a thread without autocast, whose loss another thread took backward out of a region."""

    rules = ("autocast-lost-in-thread",)

    def __init__(self) -> None:
        self._waiting: list[AutocastLost] = []

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, AutocastLost):
            self._waiting.append(event)
        elif isinstance(event, Contribution):
            lost, self._waiting = self._waiting, []
            for one in lost:
                if one.thread != event.thread and set(one.optimizers) & set(event.optimizers):
                    yield self._finding(one)

    @staticmethod
    def _finding(event: AutocastLost) -> Finding:
        region = f" (entered at line {event.entered_at.line})" if event.entered_at else ""
        return Finding(
            rule="autocast-lost-in-thread",
            severity="warning",
            at=event.at,
            message=(
                f"{event.type} ran without autocast in a thread of its own while the thread that trains was inside a "
                f"{event.dtype} region{region}: autocast belongs to the thread that enters it"
            ),
            evidence={"dtype": event.dtype, "module": event.type},
            fix="enter autocast in the thread's own function: with torch.autocast(...): return model(x)",
        )


@dataclass(slots=True)
class _Asked:
    """Regions that were asked to be on at one line, and the device they are for."""

    device: str
    dtype: str
    count: int = 0
    switched_off: bool = False


class AutocastWrongDevice(BaseCheck):
    """Autocast was asked for, yet nothing computed in half: it stands on a device where the data is not."""

    rules = ("autocast-wrong-device",)

    def __init__(self) -> None:
        self._asked: dict[Place | None, _Asked] = {}
        self._scalers: dict[Place | None, SwitchedOff] = {}
        self._devices: Counter[str] = Counter()
        self._half: Counter[str] = Counter()
        self._on: set[str] = set()  # devices of regions that are on
        self._looked = 0
        self._attempts = 0

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        match event:
            case AutocastEntered(enabled=True, dtype="float16" | "bfloat16"):
                self._on.add(event.device)
                self._note(event.made_at or event.at, event.device, event.dtype)
            case SwitchedOff(what="autocast"):
                self._note(event.at, event.device, event.dtype).switched_off = True
            case SwitchedOff(what="scaler"):
                self._scalers.setdefault(event.at, event)
            case Contribution():
                self._devices[event.device] += 1
                if event.halves is not None:
                    self._looked += 1
                    self._half.update(event.halves)
            case Attempt():
                self._attempts += 1
            case _:
                pass
        return ()

    def _note(self, at: Place | None, device: str, dtype: str) -> _Asked:
        asked = self._asked.setdefault(at, _Asked(device, dtype))
        asked.count += 1
        return asked

    def end(self, story: Story) -> Iterable[Finding]:
        if not self._attempts or not self._devices:
            return
        if self._half or set(self._devices) & self._on:
            if self._half["float16"] and not any(s.made and s.made.enabled for s in story.scalers.values()):
                yield from self._scaler_off()
            return
        data = self._devices.most_common(1)[0][0]
        for at, asked in self._asked.items():
            if asked.device not in self._devices and (asked.switched_off or self._looked):
                yield self._finding(at, asked, data)
                return

    def _finding(self, at: Place | None, asked: _Asked, data: str) -> Finding:
        scaler = next((p for p in self._scalers if p is not None), None)
        also = f"; the scaler made at line {scaler.line} switched itself off too" if scaler is not None else ""
        seen = "no operator ran in half precision" if self._looked else "nothing was cast"
        why = f", not available here, and switched itself off{also}" if asked.switched_off else also
        return Finding(
            rule="autocast-wrong-device",
            severity="warning",
            at=at,
            message=f"autocast is for {asked.device}{why}: the data is on {data}, and {seen}",
            count=asked.count,
            evidence={"autocast": asked.device, "data": data, "switched_off": asked.switched_off},
            fix=f"torch.autocast(x.device.type, dtype=torch.{asked.dtype}), and GradScaler(x.device.type) for float16",
        )

    def _scaler_off(self) -> Iterator[Finding]:
        for at, event in self._scalers.items():
            yield Finding(
                rule="autocast-wrong-device",
                severity="warning",
                at=at,
                message=(
                    f"the scaler is for {event.device}, not available here, and switched itself off: "
                    "float16 gradients carried no loss scale"
                ),
                evidence={"scaler": event.device, "float16_operators": self._half["float16"]},
                fix="torch.amp.GradScaler(x.device.type)",
            )


class CompiledAutocastMismatch(BaseCheck):
    """A compiled backward computes in half what the forward computed in FP32."""

    rules = ("compiled-autocast-mismatch",)

    def see(self, event: Event, story: Story) -> Iterable[Finding]:
        if isinstance(event, BackwardCompiled):
            yield Finding(
                rule="compiled-autocast-mismatch",
                severity="warning",
                at=event.at,
                message=(
                    f"the compiled backward of this float32 region computes {event.operators} products in "
                    f"{event.dtype}: it was traced under the autocast around the call"
                ),
                evidence={"operators": event.operators, "dtype": event.dtype, "backward_pass_autocast": event.setting},
                module=event.module,
                operator=event.operator,
                phase="backward",
                fix='torch._functorch.config.backward_pass_autocast = "off"  # before the first compiled call',
            )


MODES: tuple[type[BaseCheck], ...] = (
    AutocastAroundLoop,
    BackwardUnderAutocast,
    OffRegionComputesInHalf,
    AutocastLostInThread,
    AutocastWrongDevice,
    CompiledAutocastMismatch,
    CheckpointsAgree,
    DtypesMet,
)
