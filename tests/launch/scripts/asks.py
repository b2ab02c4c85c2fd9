import sys

print(sys.stdin.isatty(), sys.stdin.encoding)
try:
    print(repr(input("name? ")), sys.stdin.read())
    input()
except EOFError as error:
    print(repr(error))
