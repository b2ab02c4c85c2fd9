import atexit
import pickle
import sys
import threading
import time


class Mine:
    value = 3


def late():
    threading.main_thread().join(0.05)
    print(
        "late",
        pickle.loads(pickle.dumps(Mine())).value,
        sys.modules["__main__"].Mine is Mine,
        globals().get("__file__"),
    )
    if "fails" in sys.argv:
        1 / 0
    if "exits" in sys.argv:
        sys.exit(4)


atexit.register(lambda: print("atexit", pickle.loads(pickle.dumps(Mine())).value))
threading.Thread(target=late, name="late").start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(
    threading.current_thread() is threading.main_thread(),
    threading.active_count(),
    [t.name for t in threading.enumerate()],
)
if "hook" in sys.argv:
    threading.excepthook = lambda args: print("thread hook", args.exc_type, args.thread.name)
if "raise" in sys.argv:
    raise ValueError("in the main thread")
print("main ends")
