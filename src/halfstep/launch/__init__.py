"""Runs a script, a module or code as the real ``__main__``, exactly as plain python would; needs no torch.

The code runs in a fresh module that is ``sys.modules["__main__"]`` from then on and is left there, so that classes of
the script can be pickled at any time. Every way a run can end leads to one `Hooks.finish`: a normal end, `sys.exit`,
an unhandled exception, Ctrl-C, SIGTERM and `os._exit`; output, tracebacks and exit status stay those of plain python.

Children of the script are not launched: `in_spawned` makes a call in spawned ones, `Hooks.on_fork` in forked ones, and
`attend` follows the end of such a process.

What one process cannot hide: our own frames lie below the script's on the stack (``inspect.stack()``, a warning whose
``stacklevel`` is larger than the stack), ``sys.orig_argv`` names us, and threads may recurse a few calls deeper. Not
told: a process that replaces itself (``os.execv``) or is killed outright.
"""

from halfstep.launch.arrival import when_imported
from halfstep.launch.children import in_spawned
from halfstep.launch.frames import hide
from halfstep.launch.run import attend, launch, settle, stand_by
from halfstep.launch.target import Enough, Hooks, Target

__all__ = [
    "Enough",
    "Hooks",
    "Target",
    "attend",
    "hide",
    "in_spawned",
    "launch",
    "settle",
    "stand_by",
    "when_imported",
]
