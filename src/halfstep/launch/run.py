"""The run itself: the process made ready, the script, its end."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress

from halfstep.launch import source
from halfstep.launch.children import cut_tracebacks, tell_exceptions
from halfstep.launch.ending import Ending, cut, flush, interrupt, show, status
from halfstep.launch.target import Enough, Hooks, Target

_ending = Ending()
_settled: list[Target] = []


def settle(target: Target) -> None:
    """Put ``sys.argv`` and ``sys.path`` as python would have them for ``target``, and take the last place at exit.

    Called by `launch`; call it earlier when modules are imported on the way, so that they come from the script's path
    and so that exit handlers they register run before the end of the run is told.
    """
    if _settled:
        return
    _settled.append(target)
    atexit.register(_ending.at_exit)
    own = {os.path.dirname(os.path.realpath(sys.argv[0]))}
    with suppress(OSError):  # the working directory may be gone
        own.add(os.getcwd())
    sys.argv = [{"module": "-m", "code": "-c", "stdin": "-", "script": target.value}[target.kind], *target.argv]
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in own:
        del sys.path[0]
    if target.kind == "script":
        path = os.path.realpath(target.value)
        sys.path.insert(0, os.path.dirname(path if os.path.exists(path) else target.value))
    elif target.kind == "module":
        with suppress(OSError):
            sys.path.insert(0, os.getcwd())
    else:
        sys.path.insert(0, "")


def launch(target: Target, hooks: Hooks, *, verdict: bool = False) -> int:
    """Run ``target`` and return the exit status for ``sys.exit``, or raise what python's own top level is to see.

    Call it once a process, in the main thread, outside any ``except`` block, and let through what it raises.
    ``verdict``: let `Hooks.finish` decide the exit status of a run that ended well; threads are then joined and exit
    handlers run before this returns.
    """
    settle(target)
    main = source.fresh_main()
    _ending.begin(hooks)
    _ending.before(target)
    failure: BaseException | None = None
    try:
        source.run(target, main.__dict__)
    except Enough:
        _ending.by = "halfstep"
    except SystemExit as stop:
        _ending.code = status(stop)
        _flush_after(target, main.__dict__)
        if _ending.code or not verdict:
            raise
        return _judged()
    except BaseException as exc:
        failure = exc
    _flush_after(target, main.__dict__)
    _ending.code = 0 if failure is None else 1
    if failure is not None:
        cut(failure)
        _ending.raised(failure)
        try:
            show(failure)
        except SystemExit as stop:  # the script's own excepthook left
            _ending.code = status(stop)
            raise
        if type(failure) is KeyboardInterrupt:
            _ending.code = -signal.SIGINT
            interrupt(failure)
    if _is_file(target, main.__dict__):
        # Python takes these away again, unless the script left by SystemExit.
        for name in ("__file__", "__cached__"):
            main.__dict__.pop(name, None)
    if failure is None and verdict:
        del main
        return _judged()
    return _ending.code


def attend(hooks: Hooks) -> None:
    """Owe ``hooks`` the end of this process, which was not begun by `launch`: a child of the script's."""
    _ending.begin(hooks)
    if not _settled:
        atexit.register(_ending.at_exit)
    tell_exceptions(_ending.raised)
    cut_tracebacks()


def stand_by() -> None:
    """SIGTERM is to end this process even while it waits for others in a library; see `Ending.stand_by`."""
    _ending.stand_by()


def _judged() -> int:
    """The status must be known before the interpreter begins to end, so its first two acts are done here."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return _ending.verdict or 0


def _is_file(target: Target, space: dict[str, object]) -> bool:
    """Whether python reads it as a file, and not by runpy: such a one has no spec."""
    return target.kind == "stdin" or (target.kind == "script" and space.get("__spec__") is None)


def _flush_after(target: Target, space: dict[str, object]) -> None:
    if _is_file(target, space):
        flush()
