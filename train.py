"""Trains a reader on a task: `accelerate launch train.py --task sst2`."""

import sys

from pgra.cli import run
from pgra.commands.train import main

if __name__ == "__main__":
    sys.exit(run(main))
