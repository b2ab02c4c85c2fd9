"""Documents to learn: the functions of the Python standard library on this machine, as they are written there.

Read with ``ast`` from the sources; nothing is imported, run or downloaded. A document is one whole function, so that
documents have the lengths that they have. The order is that of the sorted file names: one Python version gives one
list of documents.
"""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SHORTEST = 40  # bytes
BEGIN = 0  # the byte that stands before a document, and fills short ones up
IGNORE = -100  # the label of a position that no byte stands on
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

Batch = tuple[Tensor, Tensor, Tensor]


def documents(count: int, longest: int, root: Path | None = None) -> list[bytes]:
    """The first ``count`` different functions under ``root`` (default: the standard library) that fit ``longest``."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    return list(islice(_functions(root, longest), count))


def _functions(root: Path, longest: int) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                document = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).encode()
                if SHORTEST <= len(document) <= longest and document not in seen:
                    seen.add(document)
                    yield document


class Documents(Dataset[tuple[int, bytes]]):
    """(index, document): the index says which example it was, on whatever replica."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[int, bytes]:
        return index, self.texts[index]


def collate(rows: list[tuple[int, bytes]]) -> Batch:
    """(bytes before, bytes to predict, indices): (m, length) twice and (m,), as long as the longest document here."""
    length = max(len(text) for _, text in rows)
    before = torch.full((len(rows), length), BEGIN)
    labels = torch.full((len(rows), length), IGNORE)
    for row, (_, text) in enumerate(rows):
        labels[row, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        before[row, 1 : len(text)] = labels[row, : len(text) - 1]
    return before, labels, torch.tensor([index for index, _ in rows])
