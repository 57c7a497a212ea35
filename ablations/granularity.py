"""Sentences or passages as evidence (figure 5): `pgra ablate granularity`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["granularity", *sys.argv[1:]]))
