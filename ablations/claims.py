"""True and false claims of a corpus: python ablations/claims.py --corpus FILE --output_dir DIR."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pgra import cli
from pgra.commands.common import parse, say
from pgra.data.claims import ClaimsArguments, make_claims
from pgra.data.corpus import CorpusArguments, open_corpus


def main(argv: Sequence[str]) -> int:
    r"""Make true and false claims of a corpus, a task in which evidence must help.

    Example:
      python ablations/claims.py --corpus bundled:wikipedia-19k --num_train 200 --num_test 400 \
          --output_dir claims
      pgra train --task claims --dataset_name claims --corpus claims/corpus.txt \
          --segment_order evidence_first

    A claim is a sentence of 10 to 24 words that holds one year, number or entity, kept or changed,
    with some of its other words left out. The same arguments give the same claims.
    """
    args, corpus_args = parse(main, [ClaimsArguments, CorpusArguments], argv, "claims.py")
    task = make_claims(open_corpus(corpus_args, Path(args.artifacts_dir)), args)
    counts = ", ".join(f"{count:,} {name}" for name, count in task.manifest.counts.items())
    say(f"{task.folder}{' (already there)' if task.reused else ''}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
