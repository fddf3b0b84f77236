"""`python -m tokenmill` is the command `tokenmill`."""

import sys

from tokenmill.cli import main

if __name__ == "__main__":
    sys.exit(main())
