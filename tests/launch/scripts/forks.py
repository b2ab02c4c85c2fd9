import atexit
import os
import signal
import sys

atexit.register(lambda: print("atexit", role, flush=True))
role = "parent"
sys.stdout.flush()
how = sys.argv[1]
pid = os.fork()
if pid == 0:
    role = "child"
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "raise":
        raise ValueError("in the child")
    if how == "term":
        print(signal.getsignal(signal.SIGTERM), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
else:
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(role, "ends", flush=True)
