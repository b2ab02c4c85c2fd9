"""``python -m halfstep``: the command line."""

import sys

from halfstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
