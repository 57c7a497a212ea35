"""What each mended defect is worth: `pgra ablate profiles`, with its arguments."""

import sys

from pgra.cli import run
from pgra.commands.ablate import main

if __name__ == "__main__":
    sys.exit(run(main, ["profiles", *sys.argv[1:]]))
