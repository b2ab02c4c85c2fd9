import sys

print("package", __name__, sys.argv[0])
