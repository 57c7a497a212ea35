"""Which examples stand in the prompt: `pgra ablate exemplars`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["exemplars", *sys.argv[1:]]))
