"""Code that looks __main__ up at odd times."""

import importlib
import pkgutil
import sys
import types

print(importlib.import_module("__main__").__dict__ is globals(), sys.modules["__main__"].__spec__)
try:
    print(importlib.util.find_spec("__main__"))
except ValueError as error:
    print(error)
kept = sys.modules["__main__"]
sys.modules["__main__"] = types.ModuleType("__main__")
import __main__  # noqa: E402

print(vars(__main__) is globals(), kept.__name__, pkgutil.resolve_name("__main__") is __main__)
sys.modules["__main__"] = kept
value = 1
exec("value = 2")
print(value, locals() is globals(), __builtins__.__name__, "launch" in dir(), sorted(set(dir()) - set(dir(kept))))
