"""Pairs to retrieve: the functions of the Python standard library on this machine, signature and docstring.

Read from the sources with ``ast``; nothing is imported, run or downloaded. The order is that of the sorted paths, so
one Python version gives one set of pairs.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch

PADDING = 0
BUCKETS = 1 << 14  # rows of the embedding that pieces of words are hashed to; row 0 is padding
PIECES = 8  # of one word, at most
_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")  # splits camelCase, snake_case and prose alike


class Pair(NamedTuple):
    signature: str  # the query
    docstring: str  # the document


def pairs(root: Path | None = None) -> list[Pair]:
    """Every documented function under ``root`` (default: the standard library), one pair a docstring."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Pair] = {}
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            for pair in _documented(path):
                found.setdefault(pair.docstring, pair)
    return list(found.values())


def _documented(path: Path) -> Iterator[Pair]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # templates and deliberately broken files
        return
    owner = {child: node.name + "." for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = " ".join((ast.get_docstring(node) or "").split())
            if len(docstring.split()) >= 4:
                yield Pair(f"{owner.get(node, '')}{node.name}({ast.unparse(node.args)})", docstring)


def encode(texts: list[str], words: int) -> torch.Tensor:
    """The first ``words`` words of each text as pieces (word and trigrams, hashed): (texts, words, PIECES), 0 pads."""
    known: dict[str, list[int]] = {}
    absent = [PADDING] * PIECES
    rows = []
    for text in texts:
        row = [known.get(word) or known.setdefault(word, _pieces(word)) for word in _WORD.findall(text)[:words]]
        rows.append(row + [absent] * (words - len(row)))
    return torch.tensor(rows, dtype=torch.long).view(len(texts), words, PIECES)


def _pieces(word: str) -> list[int]:
    edged = f"<{word.lower()}>"
    pieces = dict.fromkeys([edged, *(edged[i : i + 3] for i in range(len(edged) - 2))])
    ids = [crc32(piece.encode()) % (BUCKETS - 1) + 1 for piece in pieces][:PIECES]
    return ids + [PADDING] * (PIECES - len(ids))
