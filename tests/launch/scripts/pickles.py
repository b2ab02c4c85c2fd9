import multiprocessing
import pickle
import sys


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(self) is type(other) and self.x == other.x


def double(point):
    print("child", __name__, point.x, type(point).__module__, sys.argv, flush=True)
    return Point(point.x * 2)


print("body", __name__, flush=True)
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))) == Point(3), pickle.dumps(double))
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(1) as pool:
        print(pool.map(double, [Point(4)])[0] == Point(8))
    child = context.Process(target=sys.exit, args=(5,))
    child.start()
    child.join()
    print(child.exitcode)
    child = context.Process(target=Point)
    child.start()
    child.join()
    print(child.exitcode)
