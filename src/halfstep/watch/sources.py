"""The user's source, asked for a line: where something that was observed in the run is written down."""

from __future__ import annotations

import ast
import functools
import linecache
import re
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


@functools.lru_cache(maxsize=256)
def divides_by_count(file: str, line: int, number: float) -> bool | None:
    """Whether what the line divides by is how many micro-batches a group has, as far as the source tells.

    It is where its name says so, or where the file counts with it (``% A``, ``== A``, ``range(A)``). None: the line
    shows no division (a tool makes it), or there is no source.
    """
    parsed = tree(file)
    if parsed is None:
        return None
    divisors = [d for node in ast.walk(parsed) if _covers(node, line) for d in _divisors(node)]
    if not divisors:
        return None
    names = {name for d in divisors for name in _all_names(d)}
    names |= {name for given in _given(parsed, line, names) for name in _all_names(given)}
    counted = [c for node in ast.walk(parsed) for c in _counters(node)]
    if any(isinstance(c, ast.Constant) and c.value == number for c in counted if not names):
        return True
    return any(_COUNT.search(n) for n in names) or bool(names & {n for c in counted for n in _all_names(c)})


_COUNT = re.compile(r"acc|micro|group|every|window|chunk|mini|cumul|grad.*step|^[AaKk]$", re.IGNORECASE)


def _covers(node: ast.AST, line: int) -> bool:
    return isinstance(node, (ast.stmt, ast.expr)) and node.lineno <= line <= (node.end_lineno or node.lineno)


def _divisors(node: ast.AST) -> list[ast.expr]:
    """What a quotient (or a product with an inverse) divides by."""
    match node:
        case ast.BinOp(op=ast.Div(), right=by) | ast.AugAssign(op=ast.Div(), value=by):
            return [by]
        case ast.Call(func=ast.Attribute(attr="div" | "div_" | "true_divide" | "divide"), args=[*_, by]):
            return [by]
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return [
                by for by in (left, right) if isinstance(by, (ast.Name, ast.Attribute)) and "loss" not in ast.dump(by)
            ]
        case _:
            return []


def _counters(node: ast.AST) -> list[ast.expr]:
    """What a file counts with."""
    match node:
        case ast.BinOp(op=ast.Mod() | ast.FloorDiv(), right=by):
            return [by]
        case ast.Compare(ops=[ast.Eq() | ast.GtE()], left=left, comparators=[right]):
            return [left, right]
        case ast.Call(func=ast.Name(id="range" | "islice"), args=arguments):
            return list(arguments)
        case _:
            return []


def _all_names(node: ast.AST) -> set[str]:
    """Names and attributes in an expression, and the keys it takes (``cfg["accumulate"]``)."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    found |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    keys = {n.slice.value for n in ast.walk(node) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant)}
    return {n for n in found | keys if isinstance(n, str) and n not in ("self", "float", "int")}


def _given(parsed: ast.Module, line: int, names: set[str]) -> list[ast.expr]:
    """What callers pass for these names, where they are parameters of the function that holds the line."""
    given: list[ast.expr] = []
    holders = [n for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef) and _covers(n, line)]
    for holder in holders:
        parameters = [a.arg for a in [*holder.args.posonlyargs, *holder.args.args, *holder.args.kwonlyargs]]
        given += [d for d in holder.args.defaults if names & set(parameters)]
        for call in ast.walk(parsed):
            if isinstance(call, ast.Call) and _last(call.func) == holder.name:
                bound = [p for p in parameters if p != "self"]
                given += [value for name, value in zip(bound, call.args, strict=False) if name in names]
                given += [k.value for k in call.keywords if k.arg in names]
    return given


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
