"""A prompt's examples by nearest neighbours: KATE as MemPrompt's prefix (Madaan et al. 2022, 4.2).

In every system a question's nearest examples stand before it. Prompts then share no prefix.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pgra.core import Example
from pgra.data.read import read_table
from pgra.data.text import LEAK_JACCARD
from pgra.errors import ConfigError, DataError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selection import ExemplarPool, Nearest
from pgra.exemplars.similarity import open_similarity
from pgra.memory.experiment import StreamArguments
from pgra.memory.lookup import LookupArguments, strip_slot
from pgra.memory.prompts import FewShot, PromptExample
from pgra.memory.stream import read_texts

logger = logging.getLogger(__name__)


def read_pool(path: Path) -> list[PromptExample]:
    """Read examples to choose from.

    jsonl with `question`, `answer` (or `answers`, of which the first is shown), perhaps `feedback`.

    Raises:
        DataError: If a line lacks a question or an answer, or there is no line.
    """
    pool = []
    for record in read_table(path, ("jsonl",)):
        named = "answer" if "answer" in record.fields else "answers"
        question, answer, *_ = read_texts(record, ["question", named])
        (feedback,) = read_texts(record, ["feedback"]) if "feedback" in record.fields else [""]
        pool.append(PromptExample(question, answer, feedback))
    if not pool:
        raise DataError(f"{path} holds no example")
    return pool


def without_slots(examples: Sequence[Example]) -> list[Example]:
    """Remove from each question the word in <...>, if anything is left then."""
    return [
        replace(example, fields={"question": strip_slot(example.text) or example.text})
        for example in examples
    ]


def choose_examples(
    few_shot: FewShot, questions: Sequence[str], args: StreamArguments, lookup: LookupArguments
) -> FewShot:
    """Return a prompt whose examples are each question's nearest, the nearest first.

    They come from the prompt's own and `prefix_pool`; a question never sees itself or a near copy
    (`LeakGuard`). If fewer share a word with it (BM25), the pool's first others follow. Questions
    are compared in the settled look-up's key form, and by its encoder if `args` has none. A
    question that is not among `questions` gets the prompt's own examples.

    Raises:
        ConfigError: If the pool holds fewer examples than asked for (the paper's k).
        ModelError: If the encoder cannot be found or loaded.
    """
    more = read_pool(Path(args.prefix_pool)) if args.prefix_pool else []
    pool, own = [*few_shot.examples, *more], len(few_shot.examples)
    count = args.prefix_examples or (own if more else (own + 1) // 2)
    root = args.context.artifacts / "neighbors" / f"memory-{few_shot.name}"
    examples = [
        Example(f"question-{i}", {"question": shown.question}, shown.answer)
        for i, shown in enumerate(pool)
    ]
    exemplars = ExemplarPool(examples, jaccard=LEAK_JACCARD, root=root)
    distinct = exemplars.guard.distinct.tolist()
    if not 0 < count <= len(distinct):
        raise ConfigError(
            f"prefix_examples is {count}, and there are {len(distinct)} different examples to "
            "choose from: give another number, or more examples with --prefix_pool"
        )
    similarity = open_similarity(
        SelectionArguments(encoder=args.prefix_encoder or lookup.encoder),
        examples,
        root,
        device=args.device,
        key=None if lookup.key_form == "whole" else without_slots,
    )
    selector = Nearest(SelectionArguments(num_exemplars=count), exemplars, similarity)
    asked = list(dict.fromkeys(questions))
    queries = [Example(f"question-{i}", {"question": text}) for i, text in enumerate(asked)]
    chosen = selector.choose(queries)
    logger.info(
        "prefix: each of %d questions has its own %d of %d examples, so that prompts share "
        "nothing; %d examples were left out, being nearly a question itself",
        *(len(asked), count, len(distinct), int(chosen.num_dropped.sum())),
    )
    nearest = {}
    for i, question in enumerate(asked):
        rows, is_leak = chosen.of(i), exemplars.guard.leaks(question)
        others = (row for row in distinct if row not in rows and not is_leak(row))
        nearest[question] = tuple(pool[row] for row in [*rows, *others][:count])
    return replace(few_shot, nearest=nearest)
