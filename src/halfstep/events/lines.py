"""Events as versioned JSON lines, and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from halfstep.events.base import Event


def _kinds(base: type[Event]) -> Iterator[type[Event]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@functools.cache
def _registry() -> dict[str, type[Event]]:
    return {kind.__name__: kind for kind in _kinds(Event)}


_FIELD = {"kind": "of"}  # a field that bears the name of the line's own key
_NAME = {written: name for name, written in _FIELD.items()}


def encode(event: Event) -> str:
    """One line of JSON: {"kind": class name, fields that differ from their default}."""
    out: dict[str, Any] = {"kind": type(event).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default or (field.default is dataclasses.MISSING and value is None):
            out[_FIELD.get(field.name, field.name)] = _dump(value)
    return json.dumps(out, separators=(",", ":"))


def _dump(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _dump(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _dump(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dump(v) for v in value]
    return value


def flat(value: Any) -> Any:
    """A record of this module, or values made of them, as plain data for JSON; `restored` reads it back."""
    return _dump(value)


def restored(kind: type[Any], raw: Any) -> Any:
    """What `flat` made of a value of the dataclass ``kind``; names it does not know are passed over."""
    return _load(raw, kind)


def decode(line: str) -> Event | None:
    """The event of a line; None for a kind this version does not know (a later one wrote it)."""
    raw = json.loads(line)
    kind = _registry().get(raw.pop("kind", ""))
    if kind is None:
        return None
    hints = _hints(kind)
    raw = {_NAME.get(name, name): value for name, value in raw.items()}
    return kind(**{name: _load(value, hints[name]) for name, value in raw.items() if name in hints})


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _load(value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (types.UnionType, typing.Union):
        return _load(value, next(a for a in args if a is not type(None)))
    if origin is tuple:
        return tuple(_load(v, args[0]) for v in value)
    if origin is not None and isinstance(value, dict):
        key = args[0] if args else str
        return {(int(k) if key is int else k): v for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(type, hint))
        return hint(**{k: _load(v, hints[k]) for k, v in value.items() if k in hints})  # type: ignore[operator]
    return value
