"""Evidence a query, d (table 6, figure 3 right): `pgra ablate d`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["d", *sys.argv[1:]]))
