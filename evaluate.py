"""Measures a trained run again: `python evaluate.py --run runs/NAME`."""

import sys

from pgra.cli import run
from pgra.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(run(main))
