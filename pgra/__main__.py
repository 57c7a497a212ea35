"""`python -m pgra`: the same as `pgra`."""

import sys

from pgra.cli import main

if __name__ == "__main__":
    sys.exit(main())
