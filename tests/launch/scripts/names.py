"""What a script is told about itself."""

import builtins
import sys

import __main__

here = sys.modules["__main__"]
print(__name__, __doc__, __package__, __spec__, sys.argv, sys.path)
print(list(globals()))
print(globals().get("__file__"), globals().get("__cached__"))
loader = globals()["__loader__"]
print(
    loader if isinstance(loader, type) else (type(loader), getattr(loader, "name", None), getattr(loader, "path", None))
)
print(__builtins__ is builtins, here is __main__, vars(here) is globals(), repr(here))
print(globals().get("__annotations__"), sys.flags, sys.warnoptions, sys.getrecursionlimit())
print(sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__, hasattr(sys, "last_value"))
code = sys._getframe().f_code
print(code.co_name, code.co_filename, code.co_flags, code.co_firstlineno)
