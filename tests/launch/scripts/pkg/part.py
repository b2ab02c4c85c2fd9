import os
import pickle
import sys


class Piece: ...


def fail():
    raise ValueError("in a part")


print("part", __name__, __package__, sys.argv, pickle.dumps(Piece)[-20:])
if __name__ == "__main__":
    print(os.path.basename(__cached__).split(".")[0], sys.modules["__main__"].Piece is Piece)
    if "fail" in sys.argv:
        fail()
    if "exit" in sys.argv:
        sys.exit("said by a module")
