"""Sizes of the LM (table 9, figure 4): `pgra ablate opt_size`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["opt_size", *sys.argv[1:]]))
