"""First stages (table 11, figure 6): `pgra ablate retriever`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["retriever", *sys.argv[1:]]))
