import atexit
import sys


class Thing:
    def __str__(self):
        return "a thing"


class Leave(SystemExit):
    code = 5


atexit.register(lambda: print("atexit", globals().get("__file__") is None))
print("before")
kind = sys.argv[1]
if kind == "none":
    sys.exit()
if kind == "object":
    sys.exit(Thing())
if kind == "subclass":
    raise Leave
if kind == "bare":
    raise SystemExit
if kind == "two":
    raise SystemExit(1, 2)
if kind == "finally":
    try:
        sys.exit(4)
    finally:
        print("finally")
if kind == "builtin":
    exit(6)
if kind == "while":
    try:
        1 / 0
    except ZeroDivisionError:
        sys.exit("after an error")
if kind == "atexit":
    atexit.register(sys.exit, 9)
    sys.exit(3)
sys.exit(eval(kind))
