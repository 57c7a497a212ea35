"""Label consistency of runs' evidence: Table 10 and Figures 2 and 4 of Guo et al. 2023.

python ablations/label_consistency.py --labeler runs/plain --runs runs/pgra runs/fid \
    --output_dir runs/consistency    # the same as: pgra worth ...
"""

import sys

from pgra.cli import run
from pgra.commands.report import consistency

if __name__ == "__main__":
    sys.exit(run(consistency))
