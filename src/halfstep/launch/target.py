"""The seam between a launcher and a watcher: what is run, what the watcher is told, how it ends a run early."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass
class Target:
    """What to run: ``value`` is the path, the module's name or the code; ``argv`` are the arguments after it."""

    kind: Literal["script", "module", "code", "stdin"]
    value: str
    argv: list[str] = field(default_factory=list)


class Hooks(Protocol):
    """What a watcher is told. An `Exception` in one of these never fails the run.

    ``before`` comes when all is ready and no line of the script has run. ``raised`` gets an unhandled exception (Ctrl-C
    included, `SystemExit` not) with its traceback cut to the script's frames, before it is printed. ``finish`` is
    called once, last: threads were joined and the script's exit handlers ran where python would do so. ``code`` is the
    exit status as `subprocess` tells it (a signal is negative; None: unknown), ``by`` is "script" or "halfstep". The
    status it returns replaces the script's only after a normal end under ``launch(verdict=True)``.

    ``on_fork`` is called in a forked child, where the parent's hooks are never called again: it returns hooks for the
    child, or None to say nothing there. It must be quick: every worker of a data loader comes by.
    """

    def before(self, target: Target) -> None: ...
    def raised(self, exc: BaseException) -> None: ...
    def finish(self, code: int | None, by: str) -> int | None: ...
    def on_fork(self) -> Hooks | None: ...


class Enough(SystemExit):
    """Ends the run normally, from within a training call: the watch has seen as many updates as it was asked to.

    A `SystemExit`, so that ``except Exception`` lets it pass, ``finally`` blocks run, and a thread or a child process
    that ends by it stays silent.
    """

    def __init__(self) -> None:
        super().__init__(0)
        if threading.current_thread() is threading.main_thread():
            return
        told = threading.excepthook  # by itself it is silent for SystemExit, but not for classes of it

        def silent(args: threading.ExceptHookArgs) -> None:
            if args.exc_type is not Enough:
                told(args)

        threading.excepthook = silent
