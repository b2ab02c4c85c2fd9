count: int = 3


def grow(x: list[int]) -> float: ...


print(__annotations__, grow.__annotations__)
try:
    later: Missing
except NameError as error:
    print(error)
