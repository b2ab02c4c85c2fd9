"""What is computed in half precision and where: the autocast region of a run, or none."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from halfstep.errors import PolicyError

NAMES = ("fp32", "fp16", "bf16", "auto")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALVES = ("float16", "bfloat16")
_OFF: AbstractContextManager[Any] = nullcontext()


class Precision:
    """The precision of a run: "fp32", "fp16", "bf16", or "auto", resolved on the device the loss is computed on.

    ``device`` is a device or device type. None takes the accelerator where there is one, and is corrected by the
    first loss seen (a model may well be trained on the CPU of a machine that has an accelerator); until then the
    region covers both.
    """

    def __init__(self, name: str, device: torch.device | str | None = None, *, activated: bool = True) -> None:
        if name not in NAMES:
            raise PolicyError(f"unknown precision {name!r}", f"one of {', '.join(map(repr, NAMES))}")
        self.declared = name
        self.activated = activated
        try:
            self.device_type = accelerator_type() if device is None else torch.device(device).type
        except (RuntimeError, TypeError) as error:
            why = str(error).splitlines()[0]
            raise PolicyError(f"device={device!r} is no device torch knows ({why})", 'for example "cuda"') from error
        self.settled = device is not None
        """Whether the device is certain: declared, or seen."""
        self.entered = False
        """Whether a region was asked for: a run that never did computed nothing in half by way of the manager."""
        self._reusable: torch.autocast | None = None
        self._resolve()

    def _resolve(self) -> None:
        name = "fp32" if not self.activated else self.declared
        self.name = native(self.device_type) if name == "auto" else name
        self.dtype = _DTYPES.get(self.name)
        self._both = not self.settled and self.device_type != "cpu" and self.dtype is not None
        self._reusable = None
        if self.dtype is not None and not self._both:
            self._reusable = torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: FP16 only, whose range ends at 65504 and 6e-8."""
        return self.name == "fp16"

    def settle(self, device: torch.device) -> None:
        """Learn the device from the first loss. A declared device that the loss is not on is an error."""
        if not self.settled:
            self.settled = True
            changed = device.type != self.device_type
            self.device_type = device.type
            if changed or self._both:
                self._resolve()
        elif device.type != self.device_type:
            raise PolicyError(
                f"the loss is on {device.type}, the manager's device is {self.device_type}: autocast covered nothing",
                f"MixedPrecisionManager(device={device.type!r}), or move model and data to {self.device_type}",
            )

    def region(self) -> AbstractContextManager[Any]:
        """The autocast region for one forward; nothing for FP32.

        One object is reused, which is cheaper; inside another region a fresh one is made, since the same object
        nested would leave autocast on.
        """
        if self.dtype is None:
            return _OFF
        self.entered = True
        if self._reusable is not None and not torch.is_autocast_enabled(self.device_type):
            return self._reusable
        if not self._both:
            return torch.autocast(self.device_type, dtype=self.dtype)
        both = ExitStack()
        both.enter_context(torch.autocast(self.device_type, dtype=self.dtype))
        both.enter_context(torch.autocast("cpu", dtype=_DTYPES[self._name_on("cpu")]))
        return both

    def full(self) -> AbstractContextManager[Any]:
        """A region without autocast. It casts nothing by itself: call ``.float()`` on half-precision inputs."""
        if self.dtype is None:
            return _OFF
        if not self._both:
            return torch.autocast(self.device_type, enabled=False)
        both = ExitStack()
        both.enter_context(torch.autocast(self.device_type, enabled=False))
        both.enter_context(torch.autocast("cpu", enabled=False))
        return both

    def _name_on(self, device_type: str) -> str:
        return native(device_type) if self.declared == "auto" else self.declared

    def __repr__(self) -> str:
        if not self.activated:
            return f"fp32 (not activated; {self.declared} declared)"
        resolved = f"{self.name} on {self.device_type}" + ("" if self.settled else ", until the first loss")
        return f"auto ({resolved})" if self.declared == "auto" else resolved


def accelerator_type() -> str:
    """The type of the device training runs on by default: the accelerator's, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def native(device_type: str) -> str:
    """The half precision to prefer on a device: "bf16" where it is computed natively, else "fp16".

    On a CPU always "bf16": FP16 is emulated there on most machines, tens of times slower, and BF16 needs no scale.
    """
    if device_type == "cpu":
        return "bf16"
    if device_type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "fp16" if device_type == "mps" else "bf16"
