"""Measures what evidence is worth to a reader."""

import json
from collections.abc import Sequence
from pathlib import Path

from pgra.artifacts import write_sealed
from pgra.commands.common import given_names, parse_run, quiet_libraries, say
from pgra.config import Defaults
from pgra.methods.arguments import WorthArguments


def main(argv: Sequence[str]) -> int:
    r"""Measure whether evidence will help a reader as it is.

    Examples:
      pgra worth --questions questions.jsonl --corpus docs.jsonl --reader_lm openai:MODEL \
          --sources run:bm25.trec run:dense.trec --queries queries.tsv --depths 1 3 5
      pgra worth --questions questions.jsonl --corpus docs.txt --sources bm25 random \
          --reader_lm bundled:smollm2-135m --budget 1000
      pgra worth --task sst2 --dataset_name bundled:rotten-tomatoes --max_train_samples 208 \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \
          --model_name_or_path bundled:t5-small-titles --num_candidates 50
      pgra worth --task sst2 --method ralm --reader_lm bundled:smollm2-135m --sources first_stage
      pgra worth --task sst2 --reranker cross-encoder --json worth.json

    Takes the flags of pgra train. Asks in rounds of 20 queries, without evidence and with each
    source and number of passages: bits that evidence adds to the log-probability of the right
    label, or right answers that it adds. A source that is surely worse is asked no more, and what
    is sure ends it. The last line says what to take, with its flags; pgra train --evidence auto
    takes them itself.
    """
    words = list(argv)
    if "questions" in given_names(words):
        words = ["--task", "questions", "--method", "ralm", *words]
    defaults = [Defaults("pgra worth", {"evidence": "auto"}, wins=True)]
    args, (options,) = parse_run(main, "pgra worth", words, [WorthArguments], defaults=defaults)
    quiet_libraries()
    from pgra.experiments.worth import measure_worth
    from pgra.report.tables import worth_table

    result = measure_worth(args, options)
    if options.json not in (None, "-"):
        write_sealed(Path(options.json), result)
    say(json.dumps(result, indent=2) if options.json == "-" else worth_table(result).to_text())
    return 0
