"""Records anew what the golden tests expect: `python tests/golden/record.py [GROUP ...]`."""

import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
os.environ["HF_HUB_OFFLINE"] = "1"

SHOWN = 20

import golden  # noqa: E402  conftest, which it imports, sets the number of threads
import golden_compare  # noqa: E402


def main(groups: list[str]) -> int:
    """Write each group's file, and say what changed."""
    kept = golden.read(golden.FINGERPRINTS)
    for group in groups or golden.SCENARIOS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            recorded = golden.record(group, Path(folder))
        kept[group] = recorded["fingerprints"]
        path = golden.expected_path(group)
        before = golden.read(path)
        told = list(golden_compare.differences(before, recorded["steps"])) if before else []
        for line in [*told[:SHOWN], *([f": and {len(told) - SHOWN} more"] if told[SHOWN:] else [])]:
            sys.stdout.write(f"{group}{line}\n")
        golden.write(recorded["steps"], path)
        seconds = time.monotonic() - start
        sys.stdout.write(f"{path.name}: {len(recorded['steps'])} steps in {seconds:.0f} s\n")
    golden.write(kept, golden.FINGERPRINTS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
