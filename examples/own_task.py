r"""A task of your own, end to end: your CSV, a corpus, a trained reader, its metrics, a prediction.

    python own_task.py                                     # trains on tickets.csv beside it
    python own_task.py --csv yours.csv                     # columns text, label: billing, bug, wish
    python own_task.py --lm facebook/opt-1.3b --reader google/flan-t5-base \
        --encoder sentence-transformers/all-MiniLM-L6-v2

The LM picks passages for each message, the T5 reads them beside it and names the label. The run
lies in runs/. Thirty rows show how it is done, not how good it is. Guide: docs/classify.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pgra
from pgra.cli import run as run_main

CORPUS = [
    "An invoice lists what was bought and what it costs.",
    "A refund gives a customer the money back.",
    "A payment by card may be declined by the bank.",
    "A crash is when a program stops by itself.",
    "An error message says that something went wrong.",
    "An update may break what worked before.",
    "A dark theme shows light text on a dark ground.",
    "New features are often proposed by users.",
    "Many programs can export a page as a PDF.",
]
WORDS = {"billing": "money", "bug": "error", "wish": "idea"}  # what the T5 writes for each label


def main(argv: Sequence[str] | None = None) -> int:
    """Train on a CSV, and print metrics and a prediction."""
    parser = argparse.ArgumentParser(description="A task of your own, end to end.")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("tickets.csv"))
    parser.add_argument("--encoder", default="bundled:minilm-l6")
    parser.add_argument("--lm", default="bundled:smollm2-135m")
    parser.add_argument("--reader", default="bundled:t5-small-titles")
    args = parser.parse_args(argv)
    task = pgra.Task(
        name="tickets",
        labels=list(WORDS),
        prompt="Is this message about billing, a bug or a wish?\n{text}",  # what the LM reads
        reader_template="{text} It is about <extra_id_0> .",  # what the T5 reads
        verbalizer=WORDS,
    )
    run = pgra.train(
        task,
        args.csv,  # a fifth of it is held out to test on
        corpus=CORPUS,
        encoder=args.encoder,
        lm=args.lm,
        model_name_or_path=args.reader,
        num_candidates=6,
        num_evidence=2,
        num_exemplars=3,
        max_steps=10,
        learning_rate=2e-3,  # high: for ten steps
        per_device_train_batch_size=4,
        eval_steps=0,  # no checkpoint is chosen: few rows cannot tell which is best
        save_steps=0,
        artifacts_dir="artifacts",
    )
    print(run)
    for name, value in run.metrics["metrics"].items():
        print(f"{name:10} {value:.3f}")
    answer = run.predict("My card was charged again.")
    print(f"'My card was charged again.' is {answer.label} ({answer.scores[answer.label]:.2f})")
    for evidence in answer.evidence:
        print(f"  read beside it: {evidence.text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
