"""Builds a first-stage index, alone or on many GPUs (`accelerate launch -m index_build`).

On many CPUs it is `torchrun -m index_build`: `accelerate launch --cpu` starts one process only.
"""

import sys

from pgra.commands.index import main

if __name__ == "__main__":
    from pgra.cli import run

    sys.exit(run(main))
