import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--updates", type=int)
parser.add_argument("-m")
parser.add_argument("rest", nargs="*")
print(parser.parse_args())
