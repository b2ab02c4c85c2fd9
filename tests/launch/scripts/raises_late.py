import sys
import threading


def fail():
    raise ValueError("in a thread")


thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
try:
    sys.exit(2)
except SystemExit as error:
    print("caught", error.code)


class Fails:
    def __del__(self):
        raise RuntimeError("in a finaliser")


Fails()
sys.unraisablehook = lambda unraisable: print("unraisable", unraisable.exc_value)
Fails()
