"""Measures what evidence is worth to a reader, and how often it has the label of its query."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.artifacts import write_sealed
from pgra.commands.common import given_names, name_leading, parse, parse_run, quiet_libraries, say
from pgra.config import Arguments, Defaults, arg
from pgra.methods.arguments import WorthArguments


def main(argv: Sequence[str]) -> int:
    r"""Measure whether evidence will help a reader: as it is, or of finished runs.

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
      pgra worth runs/plain runs/fid runs/pgra --output_dir runs/consistency

    Takes the flags of pgra train. Asks in rounds of 20 queries, without evidence and with each
    source and number of passages: bits that evidence adds to the log-probability of the right
    label, or right answers that it adds. A source that is surely worse is asked no more, and what
    is sure ends it. The last line says what to take, with its flags; pgra train --evidence auto
    takes them itself. Of finished runs: how often evidence has the label of its query (pgra worth
    RUNS --help).
    """
    words = name_leading("--runs", argv)
    if words[:1] == ["--runs"]:
        return consistency(words)
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


@dataclass(kw_only=True)
class ConsistencyArguments(Arguments):
    """Whose evidence, and who labels it."""

    runs: list[str] = arg(
        [], "Finished runs, folders of them, or a grid of pgra ablate.", must_be_given=True
    )
    labeler: list[str] = arg([], "Plain runs, one for each task; default: those among --runs.")
    output_dir: str = arg("", "Where labels and tables go.", must_be_given=True)
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")


def consistency(argv: Sequence[str]) -> int:
    """Measure how often evidence has the label of its query.

    Examples:
      pgra train --task sst2 --method plain --output_dir runs/plain
      pgra train --task sst2 --method fid --output_dir runs/fid
      pgra train --task sst2 --output_dir runs/pgra
      pgra worth runs/pgra runs/fid --labeler runs/plain --output_dir runs/consistency
      pgra worth runs/ablate-opt_size --output_dir runs/consistency

    The plain reader gives each evidence text its pseudo-label; evidence is consistent with a query
    whose label that is: the paper's Table 10 and Figures 2 and 4.
    """
    words = name_leading("--runs", argv)
    (args,) = parse(consistency, [ConsistencyArguments], words, "pgra worth RUNS")
    quiet_libraries()
    from pgra.experiments.consistency import TABLES_FILE, report_consistency

    folder = Path(args.output_dir)
    runs = list(map(Path, args.runs))
    labelers = list(map(Path, args.labeler))
    report_consistency(runs, folder, labelers=labelers, device=args.device)
    say((folder / TABLES_FILE).read_text(encoding="utf-8"))
    return 0
