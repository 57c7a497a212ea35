"""Runs that differ in the reader's seed (table 8): `pgra ablate seeds`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["seeds", *sys.argv[1:]]))
