def add(a, b):
    """
    >>> add(1, 2)
    3
    >>> add(1, 2)
    4
    """
    return a + b


if __name__ == "__main__":
    import doctest
    import unittest

    class Case(unittest.TestCase):
        def test_add(self):
            self.assertEqual(add(1, 1), 2)

    print(doctest.testmod())
    program = unittest.main(
        exit=False, argv=["x"], testRunner=type("R", (), {"run": lambda self, t: t.countTestCases()})
    )
    print(program.result)
