"""How states are compared: `pgra ablate similarity`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["similarity", *sys.argv[1:]]))
