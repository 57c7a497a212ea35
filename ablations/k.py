"""Candidates a query, k (table 5, figure 3 left): `pgra ablate k`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["k", *sys.argv[1:]]))
