import subprocess
import sys

print("before the child", flush=True)
subprocess.run([sys.executable, "-c", "import sys; print('child', sys.argv)"])
print("buffered")
print("to stderr", file=sys.stderr)
subprocess.run(["echo", "second child"])
how = sys.argv[1]
if how != "none":  # which stream is torn down first is chance
    sys.stderr.write("half a line")
if how == "raise":
    raise ValueError("after buffered text")
if how == "exit":
    sys.exit("said by exit")
if how == "closed":
    sys.stdout.close()
if how == "stderr":
    sys.stderr.close()
if how == "none":
    sys.stdout = sys.stderr = None
if how == "raise-none":
    sys.stderr = None
    raise ValueError("nowhere to print")
if how == "swapped":
    import io

    sys.stdout = io.StringIO()
    print("kept")
if how == "failing":

    class Failing:
        def write(self, text):
            raise OSError("full")

        def flush(self):
            raise OSError("full")

    sys.stdout = Failing()
