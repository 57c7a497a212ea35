"""Label consistency of runs' evidence: Table 10 and Figures 2 and 4 of Guo et al. 2023.

python ablations/label_consistency.py runs/pgra runs/fid --labeler runs/plain \
    --output_dir runs/consistency    # the same as: pgra worth runs/pgra ...
"""

import sys

from pgra.cli import run
from pgra.commands.worth import consistency

if __name__ == "__main__":
    sys.exit(run(consistency))
