import atexit
import sys

kind = sys.argv[1]


def told():
    print("last", sys.last_type, sys.last_value, sys.last_value.__traceback__ is sys.last_traceback, __name__)
    print(sys.last_traceback.tb_frame.f_code.co_name, sys.last_traceback.tb_lineno, sys.exc_info())


def hook(type_, value, traceback):
    print("hook", type_, value, traceback is value.__traceback__, sys.exc_info())
    while traceback:
        print(traceback.tb_frame.f_code.co_name, traceback.tb_lineno)
        traceback = traceback.tb_next
    if kind == "raises":
        raise KeyError("in the hook")
    if kind == "chains":
        raise KeyError("in the hook") from value
    if kind == "exits":
        sys.exit(8)
    sys.__excepthook__(type_, value, value.__traceback__)


sys.excepthook = hook
if kind == "missing":
    del sys.excepthook
if kind == "none":
    sys.excepthook = None
if kind == "native":
    sys.excepthook = sys.__excepthook__
if kind != "missing":
    atexit.register(told)


def fail():
    print("to stdout")
    raise (KeyboardInterrupt if kind == "interrupt" else ValueError)("the script's")


fail()
