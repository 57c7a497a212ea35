"""Questions about a state: pgra's server beside transformers' `pipeline("decision")`, in pairs.

    python benchmarks/systemone.py
    python benchmarks/systemone.py --quick --json figures.json

Both read the same prompts with the same weights, the one after the other, a state of Wikipedia's
sentences each time, and give the same probabilities (`largest difference`). pgra reads a state once
for all questions; what it says of states without content it reads at the first time (`first`).
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from measuring import parse_flags, shared_parser, show_figures, write_figures
from transformers import pipeline

import pgra
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.integrations.systemone import Decider
from pgra.types import Json

NUM_TOKENS = 500  # of a state, at least
QUESTIONS: dict[str, Json] = {
    f"topic {number}": {
        "type": "choice",
        "instructions": f"Is the text about {subject}?",
        "criteria": {"yes": f"It names {subject}", "partly": None, "no": "It does not"},
    }
    for number, subject in enumerate(
        ("music", "sport", "law", "war", "a river", "a film", "trade", "a school"),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pairs, and show the medians."""
    parser = shared_parser(__doc__, quick="three states", lm="bundled:smollm2-135m")
    args = parse_flags(parser, argv)
    lm = pgra.CausalLM(args.lm, device=args.device)
    ours = Decider(lm, label_bias="none")
    theirs = pipeline("decision", model=lm.source.path, dtype=lm.dtype, device=lm.device)
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(CorpusArguments(corpus=args.corpus), Path(folder))
        sentences = corpus.texts(range(2000))
    states = []
    words: list[str] = []
    for sentence in sentences:
        words.append(sentence)
        if lm.count_tokens([" ".join(words)])[0] >= NUM_TOKENS:
            states.append(" ".join(words))
            words = []
    times: dict[str, list[float]] = {"pgra": [], "pipeline": []}
    differences = []
    for state in states[: 4 if args.quick else 21]:
        answers = []
        for name, answer in (
            ("pgra", partial(ours.answer, state, QUESTIONS)),
            ("pipeline", partial(theirs, {"state": state, "questions": QUESTIONS})),
        ):
            start = time.perf_counter()
            answers.append(answer())
            times[name].append(time.perf_counter() - start)
        for name in QUESTIONS:
            ours_and_theirs = [list(found[name]["probabilities"].values()) for found in answers]
            differences.append(np.abs(np.diff(ours_and_theirs, axis=0)).max())
    first = times["pgra"][0]
    pairs = np.array([times["pgra"][1:], times["pipeline"][1:]])  # the first one warms both up
    ratios = pairs[1] / pairs[0]
    figures = {
        "states": len(ratios),
        "pgra, seconds": float(np.median(pairs[0])),
        "pgra, first, seconds": first,
        "pipeline, seconds": float(np.median(pairs[1])),
        "ratio, median": float(np.median(ratios)),
        "ratio, lowest": float(ratios.min()),
        "largest difference": float(max(differences)),
    }
    show_figures(f"{len(QUESTIONS)} questions, states of {NUM_TOKENS} tokens", figures)
    write_figures(args.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
