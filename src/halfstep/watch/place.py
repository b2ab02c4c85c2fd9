"""Which line of the user's is this? The innermost frame outside torch, site-packages, the library and halfstep."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import sysconfig
import zlib
from pathlib import Path
from types import CodeType, FrameType

from halfstep.events import Place

_OWN = str(Path(__file__).resolve().parents[1])
_ENGINE = str(Path(_OWN, "engine"))
_FOREIGN = tuple(
    {
        _OWN,
        *(str(Path(p)) for p in sysconfig.get_paths().values() if p and p.endswith("site-packages")),
        str(Path(sysconfig.get_paths()["stdlib"])),
        str(Path(sysconfig.get_paths()["platstdlib"])),
    }
)
_known: dict[CodeType, bool] = {}
_marks: dict[CodeType, int] = {}


def is_users(code: CodeType) -> bool:
    """Whether this code is the user's own. Remembered by code object, so that a walk costs a look-up a frame."""
    users = _known.get(code)
    if users is None:
        file = code.co_filename
        users = not (
            file.startswith(_FOREIGN)
            or "site-packages" in file
            or "dist-packages" in file
            or (file.startswith("<") and not file.startswith(("<ipython", "<string>", "<stdin>", "<cell")))
        )
        _known[code] = users
    return users


def place(frame: FrameType | None = None) -> Place | None:
    """The user's line that led here; None where no frame is the user's (a thread of a library)."""
    frame = frame or sys._getframe(1)
    main: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if is_users(code):
            return _of(frame)
        if frame.f_globals.get("__name__") == "__main__" and not code.co_filename.startswith(_OWN):
            main = frame  # `-m package` inside site-packages: the script is the user's all the same
        frame = frame.f_back
    return _of(main) if main is not None else None


@functools.lru_cache(maxsize=512)
def _nearest(file: str, line: int, pattern: str) -> int | None:
    found = [n for n, text in enumerate(linecache.getlines(file), 1) if re.search(pattern, text)]
    above = [n for n in found if n <= line]
    return above[-1] if above else found[0] if found else None


def line_above(pattern: str) -> Place | None:
    """The user's line that did what no hook could see and the ledger tells: the nearest above that reads like it.

    ``pattern``: a regular expression of how it is written. None where the file has no such line.
    """
    here = place(sys._getframe(1))
    line = None if here is None else _nearest(here.file, here.line, pattern)
    return None if here is None or line is None else Place(here.file, line, here.function)


def route(frame: FrameType | None = None) -> int:
    """All lines of the user's on the stack as one number: by which way a call was reached, alike in every process."""
    frame = frame or sys._getframe(1)
    mixed = 0
    while frame is not None:
        code = frame.f_code
        if is_users(code):
            mark = _marks.get(code)
            if mark is None:
                mark = _marks[code] = zlib.crc32(f"{code.co_filename}:{code.co_qualname}".encode())
            mixed = (mixed * 1_000_003 + mark + frame.f_lineno) & 0xFFFF_FFFF_FFFF
        frame = frame.f_back
    return mixed


def by_engine() -> bool:
    """Whether halfstep's own engine made the call that is observed now, not the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code):
        if frame.f_code.co_filename.startswith(_ENGINE):
            return True
        frame = frame.f_back
    return False


def made_at(thing: object) -> Place | None:
    """The user's line that makes ``thing``: outside its own `__init__`, which may be the user's too."""
    frame: FrameType | None = sys._getframe(1)
    outside = frame
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is thing:
            outside = frame.f_back
        frame = frame.f_back
    return place(outside)


def _of(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
