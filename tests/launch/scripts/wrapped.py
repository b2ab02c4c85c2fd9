from halfstep.launch import hide


def wrapper(call):
    return call()


hide(wrapper)


def fail():
    raise ValueError("inside")


def outer():
    try:
        wrapper(fail)
    except ValueError as error:
        raise ExceptionGroup("several", [error]) from error


wrapper(outer)
