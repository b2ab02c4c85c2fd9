"""What one update did: a row of plain values, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from halfstep.engine.late import host

Outcome = Literal["applied", "skipped", "empty"]


class Update:
    """One attempt to change parameters. Values that are still on the device are waited for when they are read.

    ``outcome``            "applied", "skipped" (non-finite gradients) or "empty" (nothing was supervised)
    ``attempted_updates``  attempts of this manager so far, this one included
    ``applied_updates``    those that were applied
    ``loss``               Σ S / W over this replica's share; as the caller scaled it where no weights are known
    ``scale``              the loss scale its gradients carried (1.0: none)
    ``grad_norm``          2-norm of the gradient, unscaled and normalised, before clipping; nan where not measured
    ``clip_coefficient``   what the gradient was multiplied by to clip it (1.0: not clipped)
    ``weight``             W, the supervised elements over all replicas; None where contributions came without weights
    ``micro_batches``      of this replica
    ``replicas``           D
    ``examples``           leading dimensions, summed over all replicas; None where unknown
    ``examples_seen``, ``weight_seen``  sums over all attempts so far, None where one was unknown
    ``lr``                 of the first parameter group, as this update used it; ``lrs`` of all
    """

    __slots__ = (
        "_lrs",
        "_names",
        "_norms",
        "_settle",
        "_values",
        "attempted_updates",
        "examples",
        "examples_seen",
        "micro_batches",
        "replicas",
    )

    def __init__(
        self,
        attempted_updates: int,
        micro_batches: int,
        replicas: int,
        examples: int | None,
        examples_seen: int | None,
        lrs: list[float | Tensor],
        names: list[str],
        norms: Tensor | None,
    ) -> None:
        self._settle: Callable[[], None] | None = None
        self._values: dict[str, Any] = {}
        self.attempted_updates = attempted_updates
        self.micro_batches = micro_batches
        self.replicas = replicas
        self.examples = examples
        self.examples_seen = examples_seen
        self._lrs = lrs
        self._names = names
        self._norms = norms

    def wait_with(self, settle: Callable[[], None]) -> None:
        """Values come later: ``settle`` waits for them and fills them in."""
        self._settle = settle

    def fill(self, **values: Any) -> None:
        self._values = values

    def _read(self, key: str) -> Any:
        if self._settle is not None:
            self._settle()
            self._settle = None
        return self._values[key]

    @property
    def outcome(self) -> Outcome:
        return self._read("outcome")  # type: ignore[no-any-return]

    @property
    def applied(self) -> bool:
        return bool(self.outcome == "applied")

    @property
    def skipped(self) -> bool:
        return bool(self.outcome == "skipped")

    @property
    def empty(self) -> bool:
        return bool(self.outcome == "empty")

    @property
    def applied_updates(self) -> int:
        return int(self._read("applied_updates"))

    @property
    def loss(self) -> float:
        return float(self._read("loss"))

    @property
    def scale(self) -> float:
        return float(self._read("scale"))

    @property
    def grad_norm(self) -> float:
        return float(self._read("grad_norm"))

    @property
    def clip_coefficient(self) -> float:
        return float(self._read("clip_coefficient"))

    @property
    def weight(self) -> float | None:
        """W; of the first term where the loss has several (``weights`` has all)."""
        weights = self.weights
        return weights[0] if weights else None

    @property
    def weights(self) -> tuple[float, ...] | None:
        return self._read("weights")  # type: ignore[no-any-return]

    @property
    def weight_seen(self) -> float | None:
        return self._read("weight_seen")  # type: ignore[no-any-return]

    @property
    def lrs(self) -> tuple[float, ...]:
        return tuple(host(lr) if isinstance(lr, Tensor) else float(lr) for lr in self._lrs)

    @property
    def lr(self) -> float:
        return self.lrs[0]

    @property
    def layer_norms(self) -> dict[str, float]:
        """Parameter name -> norm of its gradient, unscaled and before clipping; empty with ``monitor=False``."""
        if self._norms is None:
            return {}
        divisor = float(self._read("divisor"))
        return {name: norm / divisor for name, norm in zip(self._names, self._norms.tolist(), strict=True)}

    def as_dict(self, *, layers: bool = False) -> dict[str, Any]:
        """Flat, plain values for a logger; ``layers=True`` adds ``layer_norms/<name>``."""
        row: dict[str, Any] = {
            "outcome": self.outcome,
            "attempted_updates": self.attempted_updates,
            "applied_updates": self.applied_updates,
            "loss": self.loss,
            "scale": self.scale,
            "grad_norm": self.grad_norm,
            "clip_coefficient": self.clip_coefficient,
            "weight": self.weight,
            "micro_batches": self.micro_batches,
            "replicas": self.replicas,
            "examples": self.examples,
            "examples_seen": self.examples_seen,
            "weight_seen": self.weight_seen,
            "lr": self.lr,
        }
        if layers:
            row.update({f"layer_norms/{name}": norm for name, norm in self.layer_norms.items()})
        return row

    def __repr__(self) -> str:
        parts = [f"Update({self.outcome}, attempted {self.attempted_updates}, applied {self.applied_updates}"]
        parts.append(f"loss {self.loss:.6g}")
        norm = f"grad_norm {self.grad_norm:.4g}"
        if self.clip_coefficient != 1.0:
            norm += f" (clipped × {self.clip_coefficient:.3g})"
        parts.append(norm)
        if self.scale != 1.0:
            parts.append(f"scale {self.scale:g}")
        parts.append(f"lr {self.lr:.3g}")
        parts.append(f"{self.micro_batches} micro-batches" if self.micro_batches != 1 else "1 micro-batch")
        if self.weight is not None:
            parts.append(f"weight {self.weight:g}")
        return ", ".join(parts) + ")"
