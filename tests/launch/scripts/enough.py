import atexit
import sys
import threading

from halfstep.launch import Enough


def train():
    try:
        try:
            raise Enough
        except Exception:
            print("never caught")
    finally:
        print("finally")


atexit.register(print, "atexit")
if sys.argv[1] == "thread":
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    sys.exit(5)
if sys.argv[1] == "leaves":
    try:
        train()
    finally:
        sys.exit(6)
train()
