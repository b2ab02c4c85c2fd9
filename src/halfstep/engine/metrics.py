"""The user's own metrics: as they were given -> as the record keeps them, plain and JSON-able."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfstep.engine.late import Mail, host
from halfstep.errors import MisuseError, PolicyError

_FIX = "a number, a text, a tensor or array of one element (loss.mean()), or lists and dicts of them"
_OWN = ("applied_updates", "kind")  # what a row holds besides


class Metrics:
    """The metrics of one call of ``manager.log``; those in tensors are on their way to the host.

    What the record could not hold is refused with :class:`~halfstep.errors.PolicyError`.
    """

    def __init__(self, unnamed: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if unnamed:
            what = "a dict" if isinstance(unnamed[0], Mapping) else "a value"
            fix = "manager.log(**metrics)" if isinstance(unnamed[0], Mapping) else "manager.log(accuracy=…)"
            raise MisuseError(f"manager.log was given {what} without a name", fix)
        for name in _OWN:
            if name in named:
                raise PolicyError(f"manager.log was given {name}=, which every row of the record has", "another name")
        self._values = {name: value if _is_one(value) else plain_of(name, value) for name, value in named.items()}
        self._mail = Mail({name: value for name, value in self._values.items() if isinstance(value, Tensor)})

    def read(self) -> dict[str, Any]:
        """The values, waited for where they were computed on an accelerator."""
        return self._values | self._mail.read()


def plain_of(name: str, value: Any) -> Any:
    """One value, numbers of NumPy and tensors of one element as numbers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if type(value) in (bool, int, float, str) or value is None else _bare(value)
    if isinstance(value, Mapping):
        return {str(key): plain_of(f"{name}[{key!r}]", entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_of(f"{name}[{position}]", entry) for position, entry in enumerate(value)]
    if _is_one(value):
        return host(value)
    if not isinstance(value, Tensor) and getattr(value, "size", None) == 1 and callable(getattr(value, "item", None)):
        number = value.item()  # NumPy's scalars, and its arrays of one element
        if isinstance(number, (bool, int, float, str)):
            return number
    shape = f" of shape {tuple(value.shape)}" if isinstance(getattr(value, "shape", None), tuple) else ""
    raise PolicyError(f"manager.log was given {name}= a {type(value).__name__}{shape}: the record holds no such", _FIX)


def _bare(value: bool | int | float | str) -> bool | int | float | str:
    """A subclass (NumPy's float64, an enumeration's member) as what it is at heart."""
    return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))


def _is_one(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
