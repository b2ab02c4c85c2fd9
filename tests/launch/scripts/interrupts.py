import atexit
import os
import signal
import sys
import time

atexit.register(print, "atexit")
how = sys.argv[1]
print(signal.getsignal(signal.SIGINT))
if how == "handled":
    signal.signal(signal.SIGINT, lambda number, frame: print("handled", number))
if how == "default":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
if how == "subclass":

    class Interrupted(KeyboardInterrupt): ...

    raise Interrupted
if how == "asyncio":
    import asyncio

    async def work():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            print("cancelled")

    asyncio.run(work())
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
except KeyboardInterrupt:
    if how == "caught":
        print("caught")
    elif how == "exit":
        sys.exit(130)
    elif how == "chained":
        raise RuntimeError("while interrupted")
    else:
        raise
finally:
    print("finally")
