import atexit
import sys
import weakref


class Last:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("deleted", self.name)


@atexit.register
def first():
    print("runs last", "__file__" in globals(), __name__, sys.modules["__main__"].__dict__ is globals())


atexit.register(print, "runs second")


@atexit.register
def failing():
    raise ValueError("in an exit handler")


kept = Last("kept")
other = Last("other")
other.cycle = other
weakref.finalize(kept, print, "finalised")
unclosed = open(sys.argv[1], "w")
unclosed.write("written by nobody's close")
print("body")
