import sys

from . import part

print(__name__, __package__, __spec__.name, __spec__.parent, sys.argv, sys.path[0], part.__name__, __file__)
if "fail" in sys.argv:
    part.fail()
