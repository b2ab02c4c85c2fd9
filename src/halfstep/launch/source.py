"""Finds, compiles and runs the code of a target in ``__main__``, step for step as python's own main program does."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from halfstep.launch.target import Target

_former: list[types.ModuleType] = []  # the module we ourselves began in: dropping it would empty its names


def fresh_main() -> types.ModuleType:
    """A new ``__main__``, as python has it before it runs anything, in its place among the modules."""
    _former.append(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    names: dict[str, Any] = {"__annotations__": {}} if sys.version_info < (3, 14) else {}
    vars(main).update(names, __loader__=importlib.machinery.BuiltinImporter, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def run(target: Target, space: dict[str, Any]) -> None:
    """Run ``target`` in ``space``, the names of `fresh_main`."""
    if target.kind == "code":
        _run_code(target.value, space)
    elif target.kind == "stdin":
        space.update(__file__="<stdin>", __cached__=None)
        _execute(_compile(sys.stdin.buffer.read(), "<stdin>"), space)
    elif target.kind == "module":
        _run_module(target.value, True)
    else:
        path = _absolute(target.value)
        if not _holds_modules(path):
            _run_file(path, space)
        else:
            if not sys.flags.safe_path:
                del sys.path[0]
            sys.path.insert(0, path)
            _run_module("__main__", False)


def _absolute(path: str) -> str:
    """As python does it: ``./x.py`` is not normalised."""
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except OSError:
        return path


def _holds_modules(path: str) -> bool:
    """Whether an import hook opens it (a folder, a zip): then its ``__main__`` is run; anything else is a file."""
    import pkgutil

    return pkgutil.get_importer(path) is not None


def _run_module(name: str, alter_argv: bool) -> None:
    # What `python -m` itself calls, so that its frames, its messages and its order of imports are the same.
    import runpy

    _deepen(lambda: runpy._run_module_as_main(name, alter_argv), by_exec=False)  # type: ignore[attr-defined]


def _run_file(path: str, space: dict[str, Any]) -> None:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        name = sys.orig_argv[0] if sys.orig_argv else sys.executable
        sys.stderr.write(f"{name}: can't open file {path!r}: [Errno {error.errno}] {os.strerror(error.errno or 0)}\n")
        raise SystemExit(2) from None
    compiled = path.endswith(".pyc") or source[:2] == importlib.util.MAGIC_NUMBER[:2]
    loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    space.update(__loader__=loader("__main__", path), __file__=path, __cached__=None)
    _execute(_unmarshal(source) if compiled else _compile(source, path), space)


def _run_code(source: str, space: dict[str, Any]) -> None:
    if sys.version_info >= (3, 14):
        import textwrap

        source = textwrap.dedent(source)
    code = compile(source, "<string>", "exec", dont_inherit=True)
    if sys.version_info >= (3, 13):
        import linecache  # from here on tracebacks of -c show their source

        linecache._register_code(code if hasattr(linecache, "_code_key") else "<string>", source, "<string>")
    _execute(code, space)


def _unmarshal(data: bytes) -> types.CodeType:
    if data[:4] != importlib.util.MAGIC_NUMBER:
        raise RuntimeError("Bad magic number in .pyc file")
    code = marshal.loads(data[16:])
    if not isinstance(code, types.CodeType):
        raise RuntimeError("Bad code object in .pyc file")
    return code


def _compile(source: bytes, path: str) -> types.CodeType:
    """Compile as a file is; only messages about encodings and null bytes differ, and then the file reader's count."""
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        known = isinstance(error, SyntaxError) and error.lineno and "(unicode error)" not in str(error)
        if not known:
            _read_as_file(source, path)
        raise


def _read_as_file(source: bytes, path: str) -> None:
    """Raise what python's file reader says of a source that does not compile; do nothing where it cannot be asked."""
    if os.name != "posix":
        return
    try:
        import ctypes
        import tempfile

        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        read = ctypes.pythonapi.PyRun_FileExFlags
        names = ctypes.py_object
        read.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, names, names, ctypes.c_int, ctypes.c_void_p]
        read.restype = ctypes.py_object
        with tempfile.TemporaryFile() as file:
            file.write(source)
            file.seek(0)
            stream = libc.fdopen(os.dup(file.fileno()), b"rb")
    except (ImportError, OSError, AttributeError):
        return
    file_input, close_it = 257, 1
    try:
        read(stream, os.fsencode(path), file_input, {}, {}, close_it, None)
    except SyntaxError as error:
        error.__context__ = None
        error.__suppress_context__ = True
        raise error from None


def _execute(code: types.CodeType, space: dict[str, Any]) -> None:
    _deepen(lambda: exec(code, space))


def _deepen(run: Callable[[], object], *, by_exec: bool = True) -> None:
    """Run with our own frames taken off the recursion limit, so that the script recurses as deep as under python."""

    def depth() -> int:
        try:
            sys.setrecursionlimit(1)  # refused, in words that end in "at the recursion depth N: the limit is too low"
        except RecursionError as error:
            return int("".join(filter(str.isdigit, str(error).rpartition("depth")[2])) or 0)
        return 0

    # Python 3.11 counts calls of C functions too: the one in `depth`, and exec.
    own = depth() - (sys.version_info < (3, 12) and not by_exec)
    get, put = sys.getrecursionlimit, sys.setrecursionlimit

    def getrecursionlimit() -> int:
        return get() - own

    def setrecursionlimit(limit: int, /) -> None:
        put(limit + own if isinstance(limit, int) and 0 < limit < 2**31 - own else limit)

    for ours, theirs in ((getrecursionlimit, get), (setrecursionlimit, put)):
        ours.__module__, ours.__qualname__, ours.__doc__ = "sys", theirs.__name__, theirs.__doc__
        setattr(sys, theirs.__name__, ours)
    put(get() + own)
    run()
