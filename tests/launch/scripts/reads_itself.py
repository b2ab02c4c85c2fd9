# This line is read by the script itself.
import inspect
import linecache
import os
import sys
import traceback


class Read:
    """Read by inspect."""


print(open(__file__).readline(), linecache.getline(__file__, 1), os.path.isabs(__file__))
print(inspect.getsource(Read), inspect.getsource(sys.modules["__main__"])[:20], inspect.getfile(Read) == __file__)
os.chdir("/")
print(inspect.getsource(Read), sys.path[0] == os.path.dirname(os.path.realpath(__file__)))
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc(file=sys.stdout)
import helper_of_mine  # noqa: E402

print(helper_of_mine.main_name(), helper_of_mine.Read is Read)
1 / 0
