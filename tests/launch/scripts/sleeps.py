import os
import sys
import threading
import time


def ready():
    time.sleep(0.2)  # by then the main thread waits below, or at the interpreter's end
    os.write(1, b"ready\n")
    time.sleep(0.5)


threading.Thread(target=ready, daemon="thread" not in sys.argv).start()
if "thread" not in sys.argv:
    try:
        time.sleep(60)
    finally:
        print("finally")
