import atexit
import os
import sys
import threading

atexit.register(print, "never printed")
print("flushed", flush=True)
print("lost in the buffer")
if sys.argv[1] == "thread":
    threading.Thread(target=os._exit, args=(7,)).start()
    threading.Event().wait()
if sys.argv[1] == "wrong":
    os._exit("text")
os._exit(eval(sys.argv[1]))
