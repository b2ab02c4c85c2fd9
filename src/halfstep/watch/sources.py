"""The user's source, asked for a line: where something that was observed in the run is written down."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable

from halfstep.events import Place


@functools.lru_cache(maxsize=64)
def tree(file: str) -> ast.Module | None:
    """The file (or notebook cell) as a syntax tree; None where there is no source."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def lines(file: str, test: Callable[[ast.AST], bool]) -> list[int]:
    """The lines of all nodes that pass, in order."""
    parsed = tree(file)
    if parsed is None:
        return []
    return sorted({node.lineno for node in ast.walk(parsed) if isinstance(node, (ast.stmt, ast.expr)) and test(node)})


def line_of(near: Place | None, test: Callable[[ast.AST], bool]) -> Place | None:
    """The one line of the same file whose node passes; None where there is none, or more than one."""
    found = lines(near.file, test) if near is not None else []
    return Place(near.file, found[0]) if near is not None and len(found) == 1 else None


def only_line(near: Place | None, test: Callable[[ast.AST], bool]) -> Place | None:
    """`line_of`, or ``near`` itself."""
    return line_of(near, test) or near


def casts(node: ast.AST) -> bool:
    """``p.data = p.data.bfloat16()`` and its like: a parameter made half behind its module's back."""
    if not isinstance(node, ast.Assign) or not any(
        isinstance(t, ast.Attribute) and t.attr == "data" for t in node.targets
    ):
        return False
    return any(isinstance(n, ast.Attribute) and n.attr in ("bfloat16", "half", "float16") for n in ast.walk(node.value))


def freezes(node: ast.AST) -> bool:
    """``p.requires_grad = False`` or ``….requires_grad_(False)``."""
    if isinstance(node, ast.Assign):
        named = any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets)
        return named and isinstance(node.value, ast.Constant) and node.value.value is False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
        given = [*node.args, *(k.value for k in node.keywords)]
        return bool(given) and isinstance(given[0], ast.Constant) and given[0].value is False
    return False


def growth(file: str, name: str) -> int | None:
    """The line that makes the variable (or attribute) of this name longer or larger; inside a loop, if there is one."""
    parsed = tree(file)
    if parsed is None:
        return None
    looped = {id(inner) for node in ast.walk(parsed) if isinstance(node, _LOOPS) for inner in ast.walk(node)}
    found = [node for node in ast.walk(parsed) if isinstance(node, (ast.stmt, ast.expr)) and _grows(node, name)]
    found.sort(key=lambda node: (id(node) not in looped, node.lineno))
    return found[0].lineno if found else None


_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_GROWING = {"append", "extend", "insert", "add", "appendleft", "setdefault", "update"}


def _grows(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=container, attr=method)) if method in _GROWING:
            return _last(container) == name
        case ast.AugAssign(target=target):
            return _last(target) == name
        case ast.Assign(targets=targets, value=value):
            if any(isinstance(t, ast.Subscript) and _last(t) == name for t in targets):
                return True
            again = any(isinstance(n, (ast.Name, ast.Attribute)) and _last(n) == name for n in ast.walk(value))
            return again and any(_last(t) == name for t in targets)
        case _:
            return False


def _last(node: ast.AST) -> str | None:
    """The name a target or container goes by: x, self.x, x[0] and x.y[0].append are all known by their last name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None
