from __future__ import annotations

import dataclasses
import typing

count: int = 3
later: Missing


@dataclasses.dataclass
class Shape:
    width: int
    other: Shape | None = None


def grow(shape: Shape) -> Absent: ...


print(__annotations__, grow.__annotations__, typing.get_type_hints(Shape), Shape(1, Shape(2)))
print(Shape.__module__, Shape.__qualname__, grow.__module__)
