from __main__ import Read


def main_name():
    import __main__

    return __main__.__name__, Read.__doc__
