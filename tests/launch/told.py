"""Launches a script with hooks that write down what they are told.

``told.py WORD SCRIPT [ARGS…]``; WORD: verdict=N, fails=VERB, forks (a child has hooks too), or - for none of these.
"""

import sys

from halfstep.launch import Target, launch

word, *argv = sys.argv[1:]


def say(*words):
    sys.__stderr__.write(" ".join(map(str, words)) + "\n")


class Told:
    def __init__(self, name="told"):
        self.name = name

    def before(self, target):
        say(self.name, "before", target, sys.argv, vars(sys.modules["__main__"]).get("__file__"))
        self.fail("before")

    def raised(self, exc):
        frames, tb = [], exc.__traceback__
        while tb:
            frames.append(tb.tb_frame.f_code.co_name)
            tb = tb.tb_next
        say(self.name, "raised", type(exc).__name__, *frames)
        self.fail("raised")

    def finish(self, code, by):
        say(self.name, "finish", code, by)
        self.fail("finish")
        return int(word.removeprefix("verdict=")) if word.startswith("verdict=") else 9

    def on_fork(self):
        self.fail("on_fork")
        return Told("child") if word == "forks" else None

    def fail(self, verb):
        if word == f"fails={verb}":
            raise ValueError(f"own fault in {verb}")


if __name__ == "__main__":
    sys.exit(launch(Target("script", argv[0], argv[1:]), Told(), verdict=word.startswith("verdict=")))
