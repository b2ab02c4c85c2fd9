import warnings


def old(level):
    warnings.warn(f"old at level {level}", DeprecationWarning, stacklevel=level)
