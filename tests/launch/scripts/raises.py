import sys


class Odd(Exception):
    def __str__(self):
        return "odd, and printed by its class"


def inner(kind):
    if kind == "plain":
        return 1 / 0
    if kind == "context":
        try:
            1 / 0
        except ZeroDivisionError:
            raise KeyError("while handling")
    if kind == "cause":
        try:
            inner("context")
        except KeyError as error:
            raise Odd from error
    if kind == "note":
        error = ValueError("with notes")
        error.add_note("one\ntwo")
        raise error
    if kind == "group":
        raise ExceptionGroup("several", [ValueError(1), KeyError(2)])
    if kind == "broken":

        class Broken(Exception):
            def __str__(self):
                raise RuntimeError

        raise Broken
    if kind == "assert":
        assert kind == "right", f"{kind} is not right"
    if kind == "base":

        class Base(BaseException): ...

        raise Base("no Exception")
    if kind == "import":
        import absent_module_of_mine
    if kind == "exec":
        exec("x = 1\nraise ValueError(x)")
    if kind == "compile":
        compile("def (", "made.py", "exec")
    if kind == "generator":
        list(inner(k) for k in ["plain"])
    if kind == "stop":
        raise StopIteration(3)


def outer(kind):
    inner(kind)


print("before")
outer(sys.argv[1])
