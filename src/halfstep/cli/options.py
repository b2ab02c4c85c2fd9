"""Values of options that several subcommands take: looked at before anything runs, for hours perhaps."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def updates(text: str) -> int:
    """An option's value as a number of updates."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of updates (1 or more)")
    return int(text)


def file(text: str) -> Path:
    """An option's value as the file to write. Refused: a folder, and what cannot be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file")
    return _writable(path, text)


def folder(text: str) -> Path:
    """An option's value as the folder to write into, made later where it is missing."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file: name a folder")
    return _writable(path, text)


def _writable(path: Path, text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty name")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission in {there}")
    return path
