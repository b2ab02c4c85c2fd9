import sys


def deep(n):
    return deep(n + 1)


def counted(n):
    try:
        return counted(n + 1)
    except RecursionError:
        return n


print(sys.getrecursionlimit(), counted(0))
if sys.argv[1:] == ["raised"]:
    sys.setrecursionlimit(300)
    print(sys.getrecursionlimit(), counted(0))
for wrong in (0, -1, "many", 2**40):
    try:
        sys.setrecursionlimit(wrong)
    except (ValueError, TypeError, OverflowError) as error:
        print(type(error), error)
deep(0)
