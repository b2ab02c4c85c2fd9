"""The end of a run: what python's top level shows and does, and the one `Hooks.finish` that is always owed."""

from __future__ import annotations

import _thread
import operator
import os
import signal
import sys
import threading
import time
import types
from contextlib import suppress
from typing import Any, NoReturn

from halfstep.launch.target import Hooks, Target

_FOLDER = os.path.dirname(__file__) + os.sep
_native_hook = sys.__excepthook__
_GRACE = 1.0  # seconds that the main thread has to hear a signal
_LAST = 5.0  # seconds for what is owed when it does not


class Ending:
    """What is owed when the process ends: one ``finish``, in the process that began, whichever way it ends."""

    def __init__(self) -> None:
        self.code: int | None = None  # the exit status as far as it is known
        self.by = "script"
        self.verdict: int | None = None  # the status that finish asked for
        self._hooks: Hooks | None = None
        self._pid = 0
        self._faults: list[str] = []
        self._real_exit = os._exit
        self._catches_terminate = False
        self._follows = False
        self._finishing = False
        self._terminated = False
        self._wakes = -1  # where bytes of signals arrive

    def begin(self, hooks: Hooks) -> None:
        """Take hold of the ends of this process; once more in a forked child that has hooks of its own."""
        self._hooks, self._pid = hooks, os.getpid()
        self._wrap_exit()
        with suppress(ValueError):  # not the main thread
            self._catch_terminate()
        if hasattr(os, "register_at_fork") and not self._follows:
            self._follows = True
            os.register_at_fork(after_in_child=self._forked)

    def before(self, target: Target) -> None:
        self._tell("before", target)

    def raised(self, exc: BaseException) -> None:
        self._tell("raised", exc)

    def at_exit(self) -> None:
        """The last exit handler to run."""
        if self._hooks is not None:
            flush()  # the script's text comes first where both go to one file
            self._finish(self.code)

    def _finish(self, code: int | None) -> None:
        if self._hooks is None or self._pid != os.getpid() or self._finishing:
            return
        self._finishing = True
        self.verdict = self._tell("finish", code, self.by)
        self._hooks = None
        self._finishing = False
        if self._faults and sys.__stderr__ is not None:
            with suppress(Exception):
                sys.__stderr__.write("".join(self._faults))
                sys.__stderr__.flush()
        if self._terminated:
            die(signal.SIGTERM)

    def _tell(self, verb: str, *words: Any) -> Any:
        if self._hooks is None:
            return None
        try:
            return getattr(self._hooks, verb)(*words)
        except Exception as error:
            self._faults.append(f"halfstep: its own {verb} failed: {type(error).__name__}: {error}\n")
            return None

    def _wrap_exit(self) -> None:
        real = self._real_exit

        def _exit(status: int) -> NoReturn:
            with suppress(TypeError):
                self._finish(operator.index(status) & 0xFF)
            real(status)

        _exit.__module__, _exit.__qualname__, _exit.__doc__ = real.__module__, real.__qualname__, real.__doc__
        os._exit = _exit

    def _catch_terminate(self) -> None:
        """Take SIGTERM where nobody has; the script still reads the default there, and may take it over."""
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def terminate(number: int, frame: object) -> None:
            self._terminated = True
            if not self._finishing:  # else: what is owed is told first
                self._finish(-number)
                die(number)

        named = signal._int_to_enum  # type: ignore[attr-defined]

        def named_but_ours(value: Any, kind: Any) -> Any:
            return named(signal.SIG_DFL if value is terminate else value, kind)

        signal._int_to_enum = named_but_ours  # type: ignore[attr-defined]
        self._catches_terminate = True
        signal.signal(signal.SIGTERM, terminate)

    def stand_by(self) -> None:
        """From now on SIGTERM ends the process even while its main thread waits in a library, as it would by default.

        Python's own handlers wait for the main thread; a rank whose fellow died may wait in a collective for long.
        """
        if not self._catches_terminate or self._wakes >= 0 or threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if others >= 0:  # the script's own
            signal.set_wakeup_fd(others)
            os.close(read)
            os.close(write)
            return
        self._wakes = read
        _thread.start_new_thread(self._wait_for_terminate, (read, signal.getsignal(signal.SIGTERM)))

    def _wait_for_terminate(self, read: int, handler: object) -> None:
        while signal.SIGTERM not in os.read(read, 1):
            pass
        time.sleep(_GRACE)
        if self._terminated or self._pid != os.getpid() or signal.getsignal(signal.SIGTERM) is not handler:
            return  # the main thread has heard it, or the script handles it itself
        self._terminated = True
        _thread.start_new_thread(self._finish, (-signal.SIGTERM,))  # dies at its end
        time.sleep(_LAST)
        die(signal.SIGTERM)

    def _forked(self) -> None:
        if self._wakes >= 0:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)  # the pipe is the parent's
            self._wakes = -1
        if self._hooks is None:
            return
        hooks = self._tell("on_fork")
        self._hooks, self._pid, self.by, self.code, self._faults = hooks, os.getpid(), "script", None, []
        self._finishing = self._terminated = False
        if hooks is not None:
            return
        os._exit = self._real_exit
        if self._catches_terminate and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it only read as the default
        self._catches_terminate = False


def die(number: int) -> None:
    """By this signal, as if nobody had caught it; from any thread."""
    try:
        signal.signal(number, signal.SIG_DFL)
    except ValueError:  # only the main thread may
        import ctypes

        put = ctypes.CDLL(None).signal
        put.argtypes = [ctypes.c_int, ctypes.c_void_p]
        put(number, None)
    os.kill(os.getpid(), number)


def flush() -> None:
    """As python flushes after a script: what cannot be written is not an error here."""
    for stream in (sys.stderr, sys.stdout):
        with suppress(Exception):
            stream.flush()


def status(stop: SystemExit) -> int:
    """The exit status that python makes of a `SystemExit`."""
    code = stop.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF


def cut(exc: BaseException) -> None:
    """Leave only the script's frames in the traceback of ``exc`` and of all that is chained to it."""
    waiting, seen = [exc], set()
    while waiting:
        error = waiting.pop()
        if id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = users(error.__traceback__)
            members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            waiting += [e for e in (error.__cause__, error.__context__, *members) if e is not None]


def users(tb: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's first frame on; our own frames before and among them are left out."""
    while tb is not None and _is_ours(tb):
        tb = tb.tb_next
    entry = tb
    while entry is not None:
        while entry.tb_next is not None and _is_ours(entry.tb_next):
            entry.tb_next = entry.tb_next.tb_next
        entry = entry.tb_next
    return tb


def _is_ours(tb: types.TracebackType) -> bool:
    return tb.tb_frame.f_code.co_filename.startswith(_FOLDER)


def show(exc: BaseException) -> None:
    """Print an unhandled exception as python's top level does: by ``sys.excepthook``, whatever that is and does."""
    kind, tb = type(exc), exc.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = kind, exc, tb
    if sys.version_info >= (3, 12):
        sys.last_exc = exc
    try:
        hook = sys.excepthook
    except AttributeError:
        sys.stderr.write("sys.excepthook is missing\n")
        _native_hook(kind, exc, tb)
        return
    try:
        hook(kind, exc, tb)
        return
    except SystemExit:
        raise
    except BaseException as error:
        second = error
    cut(second)
    sys.stderr.write("Error in sys.excepthook:\n")
    _native_hook(type(second), second, second.__traceback__)
    sys.stderr.write("\nOriginal exception was:\n")
    _native_hook(kind, exc, tb)


def interrupt(exc: KeyboardInterrupt) -> NoReturn:
    """Let Ctrl-C, which was shown, reach python's top level: only that ends the process by the signal itself."""
    tb, hook = exc.__traceback__, getattr(sys, "excepthook", None)

    def silent(*_: object) -> None:
        exc.__traceback__ = sys.last_traceback = tb
        if hook is None:
            del sys.excepthook
        else:
            sys.excepthook = hook

    sys.excepthook = silent
    raise exc
