import atexit
import os
import signal
import sys
import time

how = sys.argv[1]
atexit.register(print, "atexit")
print(signal.getsignal(signal.SIGTERM), flush=True)
if how == "handled":
    print(signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"handled {number}")), flush=True)
if how == "again":
    old = signal.signal(signal.SIGTERM, lambda number, frame: print("first", number, flush=True))
    os.kill(os.getpid(), signal.SIGTERM)
    print(signal.signal(signal.SIGTERM, old) is not None, old, signal.getsignal(signal.SIGTERM), flush=True)
if how == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "chained":
    # As libraries do: call the handler that was there before.
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: print("mine", callable(before), flush=True))
if how == "killed":
    signal.SIGTERM = signal.SIGKILL
print("lost with the buffer when nothing handles it")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.01)
print("survived")
