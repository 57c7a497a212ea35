"""Seconds of each stage (section 4.5): `pgra ablate training_cost`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["training_cost", *sys.argv[1:]]))
