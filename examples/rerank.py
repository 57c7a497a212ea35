"""Rerank texts of your own: an LM reads each after labelled examples and compares it with a query.

    python rerank.py
    python rerank.py "a boring waste of time" --documents lines.txt --k 3
    python rerank.py --lm Qwen/Qwen3-0.6B                  # any causal LM of the hub, or a folder

The labelled examples decide what counts as similar: here whether a film was liked. Guide:
docs/reranking.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pgra
from pgra.cli import run
from pgra.data.read import check_file, read_lines

EXAMPLES = [
    ("a moving, clever film", "positive"),
    ("two hours of my life wasted", "negative"),
    ("warm, witty and beautifully played", "positive"),
    ("a dull and noisy mess", "negative"),
    ("sharp, tender and alive", "positive"),
    ("flat jokes and a lifeless plot", "negative"),
    ("I laughed all the way home", "positive"),
    ("the acting is wooden", "negative"),
    ("a small miracle", "positive"),
    ("painful to sit through", "negative"),
]
DOCUMENTS = [
    "An awful, boring mess.",
    "A funny and gentle picture.",
    "The bus leaves at noon.",
    "Critics praised the tender acting.",
    "The plot is thin and the jokes are stale.",
    "He was born in Leeds in 1925.",
    "A joy from the first scene to the last.",
    "I walked out after an hour.",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the best documents for a query."""
    parser = argparse.ArgumentParser(description="Rerank texts of your own.")
    parser.add_argument("query", nargs="?", default="a warm, funny film")
    parser.add_argument("--documents", type=Path, help="a .txt file with a text on each line")
    parser.add_argument("--lm", default="bundled:smollm2-135m", help="hub id, folder, bundled:NAME")
    parser.add_argument("--k", type=int, default=5)
    args = parser.parse_args(argv)
    documents = DOCUMENTS
    if args.documents:
        check_file(args.documents, ["txt"])
        documents = [line.strip() for line in read_lines(args.documents)]

    # Four examples stand in the prompt. "whitened" puts all directions of the LM's states on one
    # scale, which it learns from the documents and the other examples; "dot" is the paper's.
    reranker = pgra.Reranker(
        args.lm, task="sst2", examples=EXAMPLES, num_exemplars=4, similarity="whitened"
    )
    reranker.fit(documents)
    for hit in reranker.rank(args.query, documents, k=args.k):
        print(f"{hit.score:8.1f}  line {hit.index + 1}  {hit.text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
