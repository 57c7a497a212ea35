"""Tells before training whether evidence will help: `pgra worth`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import about, parse_stages, quiet_libraries, say
from pgra.config import Arguments, PgraArguments, arg


@dataclass(kw_only=True)
class WorthArguments(Arguments):
    """Which ways to order are compared."""

    similarities: list[str] = arg(
        [],
        "Similarities that are compared beside the first stage's order; default: --similarity, "
        "whitened and head.",
    )
    num_labels: list[int] = arg(
        [],
        "Also measure readers of so many training examples each, and the head fitted to the same.",
        least=1,
    )
    num_draws: int = arg(20, "Draws of training examples for each --num_labels.", least=1)
    json: str | None = arg(None, "File that gets the same as numbers, as JSON.", writes=True)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Tell how many bits evidence can add to a reader, before one is trained.

    Example:
      pgra worth --task rotten-tomatoes --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --max_passages 3000 --encoder bundled:minilm-l6 \
          --lm bundled:smollm2-135m --num_candidates 50 --max_train_samples 200 \
          --max_test_samples 150

    Takes the flags of pgra train but for the reader's training. The LM reads the candidates of the
    test queries, the training queries and a draw of the corpus; its states are kept for training.
    A head on its states says which label a query, or a passage, speaks for (the LM's opinion); one
    on the encoder's vectors stands for the reader. What evidence can add is how much better the
    reader decides with its vote, in bits. It looks at no facts that evidence may hold: for claims
    and questions, train with evidence and without. --num_labels 16 32 104 asks the same of readers
    of fewer labels.
    """
    sections, (how,) = parse_stages(argv, [WorthArguments], prog="pgra worth", **about(main))
    args = PgraArguments(**sections)
    target = None if how.json is None else Path(how.json)
    from pgra.artifacts import write_json
    from pgra.core import join_context

    quiet_libraries()
    from pgra.experiments.worth import measure_worth

    context = join_context(args.runtime.device)
    worth = measure_worth(
        args,
        how.similarities,
        num_labels=how.num_labels,
        num_draws=how.num_draws,
        context=context,
    )
    if context.is_main:
        if target is not None:
            write_json(target, worth.as_json())
        if worth.curve is not None:
            say(worth.curve.to_text() + "\n")
        say(f"{worth.table().to_text()}\n\n{worth.conclude()}")
    return 0
