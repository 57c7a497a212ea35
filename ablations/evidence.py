"""Label consistency of what each similarity finds, with no reader trained (no table of the paper).

python ablations/evidence.py --task sst2 --labeler runs/plain --output_dir runs/evidence
"""

import sys

from pgra.cli import run
from pgra.commands.rerank import evidence as main

if __name__ == "__main__":
    sys.exit(run(main))
