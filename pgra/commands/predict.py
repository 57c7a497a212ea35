"""`pgra predict`: new texts, decided by a finished run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import TextArguments, name_leading, parse, quiet_libraries, say
from pgra.config import Arguments, arg
from pgra.data.read import TABLES, check_file, read_lines, read_table
from pgra.errors import ConfigError, DataError, visible

if TYPE_CHECKING:
    from pgra.report.results import Answer


@dataclass(kw_only=True)
class PredictArguments(Arguments):
    """Which run, on what, and how much is shown."""

    run: str = arg(
        "",
        "Folder of a finished run, or of its reader; or the hub id that it was pushed to.",
        must_be_given=True,
    )
    file: str | None = arg(
        None, "A text a line (.txt), or rows with the task's inputs (.jsonl, .csv, .tsv)."
    )
    json: bool = arg(
        False, "One JSON object a query, as in predictions.jsonl; null for a row without text."
    )
    num_shown: int = arg(5, "Evidence shown for a text; --json gives all.", least=0)
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    artifacts_dir: str | None = arg(None, "Folder of index and bank; default: the run's.")


def main(argv: Sequence[str]) -> int:
    """Decide new texts with a trained run, and show the evidence.

    Examples:
      pgra predict "A warm and funny film." --run runs/sst2-pgra-seed42
      pgra predict --run runs/sst2-pgra-seed42 --file new.txt --json > answers.jsonl
      pgra predict "A warm and funny film." --run runs/sst2-icl-knn
      pgra predict "A warm and funny film." --run me/sst2-pgra

    The run's own index, bank and prompt find the evidence; no training data is read. Shown are the
    label, the probability of each, and for each evidence its rank and score in stage 1, its score
    in stage 2 and its text. The LM reads a new text once, for its state is kept in the run's bank
    of queries, and those candidates that no run has read yet. Of a run of pgra icl, its data must
    be where it was, and the exemplars are shown.

    From Python, with evidence of your own:
      pgra.Reader.load("runs/sst2-pgra-seed42").predict(texts, evidence)
    """
    words = name_leading("--text", argv)
    texts, args = parse(main, [TextArguments, PredictArguments], words)
    if bool(texts.text) == bool(args.file):
        raise ConfigError("give texts (pgra predict 'a text' --run RUN) or --file FILE, not both")
    quiet_libraries()
    from pgra.report.results import answer_line
    from pgra.runs import Run

    run = Run.load(args.run, device=args.device, artifacts_dir=args.artifacts_dir)
    inputs = run.method.data.task.inputs
    queries = texts.text or read_queries_file(Path(args.file), inputs)
    answers = iter(run.predict([query for query in queries if query is not None]))
    blocks = []
    for query in queries:
        if query is None:
            blocks.append("null" if args.json else "query: -")
        elif args.json:
            row = answer_line(next(answers))
            del row["id"], row["label"]
            blocks.append(json.dumps(row, ensure_ascii=False))
        else:
            blocks.append(show(next(answers), args.num_shown))
    say("\n".join(blocks) if args.json else visible("\n\n".join(blocks)))
    return 0


def show(answer: "Answer", num_shown: int) -> str:
    """Lay out an answer for a person."""
    best = sorted(answer.scores.items(), key=lambda item: -item[1])
    scores = ", ".join(f"{name} {score:.3f}" for name, score in best)
    label = f"label: {answer.label}"
    lines = [f"query: {answer.text}", f"{label}  (probabilities: {scores})" if scores else label]
    exemplars = answer.exemplars[:num_shown]
    evidence = answer.evidence[:num_shown]
    if exemplars:
        number = len(answer.exemplars)
        lines.append(f"exemplars, {len(exemplars)} of {number}, in the prompt's order:")
        lines += [f"  {example.label}: {example.text}" for example in exemplars]
    if evidence:
        lines.append(f"evidence, {len(evidence)} of {len(answer.evidence)}, best first:")
        lines.append("  stage-1 rank    score  stage-2 score  passage")
    for passage in evidence:
        head = f"  {passage.stage1_rank:>12}{passage.stage1_score:>9.3f}{passage.score:>15.3f}"
        lines.append(f"{head}  {passage.text}")
    return "\n".join(lines)


def read_queries_file(path: Path, inputs: Sequence[str]) -> list[str | Mapping[str, str] | None]:
    """Read queries from a file; None is a row without text, and blank lines are skipped.

    The file is .txt with a text a line, or .jsonl, .csv or .tsv with the inputs by name; `.gz` or
    `.zst` may follow.

    Raises:
        DataError: If it cannot be read, holds none, or a line lacks an input.
    """
    queries: list[str | Mapping[str, str] | None] = []
    if check_file(path, ("txt", *TABLES)) == "txt":
        queries += filter(None, map(str.strip, read_lines(path)))
    else:
        for record in read_table(path):
            fields = {name: record.text(name) for name in inputs}
            queries.append(fields if any(fields.values()) else None)
    if not any(queries):
        raise DataError(f"{path} holds no text")
    return queries
