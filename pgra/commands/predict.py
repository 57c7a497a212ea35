"""Decides new texts with a trained run, and shows the evidence: `pgra predict`."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import about, quiet_libraries, say
from pgra.commands.index import TextArguments, name_leading_texts
from pgra.config import Arguments, arg, parse_arguments
from pgra.data.read import TABLES, check_file, read_lines, read_table
from pgra.errors import ConfigError, DataError, visible

if TYPE_CHECKING:
    from pgra.report.results import EvidenceLine
    from pgra.runs import Answer


logger = logging.getLogger(__name__)

# How `pgra predict` shows an answer: as JSON, or laid out for a person.


def as_json(answer: "Answer") -> dict[str, Any]:
    """Return an answer as `predictions.jsonl` has it."""
    fields = dict(answer.query.fields)
    return {
        "text": answer.query.text,
        **({"fields": fields} if len(fields) > 1 else {}),
        "prediction": answer.prediction.label,
        "scores": dict(answer.prediction.scores),
        "evidence": [each.as_json() for each in answer.evidence],
        **answer.details,
    }


def show(answer: "Answer", num_shown: int) -> str:
    """Lay out an answer for a person."""
    lines = [
        f"query: {answer.query.text}",
        f"label: {_decided(answer.prediction.label, answer.prediction.scores)}",
    ]
    exemplars = answer.exemplars[:num_shown]
    if exemplars:
        number = len(answer.exemplars)
        lines.append(f"exemplars, {len(exemplars)} of {number}, in the prompt's order:")
        lines += [f"  {example.label}: {example.text}" for example in exemplars]
    shown = answer.evidence[:num_shown]
    if shown:
        lines.append(f"evidence, {len(shown)} of {len(answer.evidence)}, best first:")
        lines.append("  stage-1 rank    score  stage-2 score  passage")
        lines += [_show_line(line) for line in shown]
    return "\n".join(lines)


def _decided(label: str, scores: Mapping[str, float]) -> str:
    chances = sorted(scores.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {chance:.3f}" for name, chance in chances)
    return f"{label}  (probabilities: {told})" if told else label


def _show_line(line: "EvidenceLine") -> str:
    head = f"  {line.stage1_rank:>12}{line.stage1_score:>9.3f}{line.score:>15.3f}  "
    return f"{head}{line.text}"


@dataclass(kw_only=True)
class PredictArguments(Arguments):
    """Which run, on what, and how much is shown."""

    run: str = arg(
        "",
        "Folder of a finished run; of a trained reader also its reader/, or the hub id that it was "
        "pushed to.",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Decide new texts with a trained run, and show the evidence.

    Examples:
      pgra predict "A warm and funny film." --run runs/sst2-pgra-seed42
      pgra predict --run runs/sst2-pgra-seed42 --file new.txt --json > answers.jsonl
      pgra predict "A warm and funny film." --run runs/sst2-icl-knn
      pgra predict "A warm and funny film." --run me/sst2-pgra

    The run's own index, bank and prompt find the evidence; no training data is read (but with
    exemplars knn, for the text's own neighbors). Shown are the label, the probability of each, and
    for each evidence its rank and score in stage 1, its score in stage 2 and its text. The LM reads
    a new text once, for its state is kept in the run's bank of queries, and those candidates that
    no run has read yet. Of a run of pgra icl, its data must be where it was, and the exemplars are
    shown.

    From Python, with evidence of your own:
      pgra.Reader.load("runs/sst2-pgra-seed42").predict(texts, evidence)
    """
    texts, args = parse_arguments(
        [TextArguments, PredictArguments],
        name_leading_texts(argv),
        prog="pgra predict",
        **about(main),
    )
    if bool(texts.text) == bool(args.file):
        raise ConfigError(
            "give either texts (pgra predict 'some text' --run RUN) or --file FILE: one of them"
        )
    quiet_libraries()
    from pgra.runs import Run

    run = Run.load(args.run, device=args.device, artifacts_dir=args.artifacts_dir)
    inputs = run.method.data.task.inputs
    queries = texts.text or read_queries_file(Path(args.file), inputs)
    answers = run.predict([query for query in queries if query is not None])
    if args.json:
        found = iter(answers)
        rows = [None if query is None else as_json(next(found)) for query in queries]
        say("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        say(visible("\n\n".join(show(answer, args.num_shown) for answer in answers)))
    return 0


def read_queries_file(path: Path, inputs: Sequence[str]) -> list[str | Mapping[str, str] | None]:
    """Read queries from a file; None is a row without text, and blank lines are skipped.

    The file is .txt with a text a line, or .jsonl, .csv or .tsv with the inputs by name; `.gz` or
    `.zst` may follow.

    Raises:
        DataError: If it cannot be read, holds none, or a line lacks an input.
    """
    if check_file(path, ("txt", *TABLES)) == "txt":
        texts = [line.strip() for line in read_lines(path)]
        queries: list[str | Mapping[str, str] | None] = [text for text in texts if text]
    else:
        queries, blank = [], []
        for record in read_table(path):
            fields = {name: record.text(name) for name in inputs}
            queries.append(fields if any(fields.values()) else None)
            blank += [] if any(fields.values()) else [record.line]
        if blank:
            logger.warning(
                "%s: %d rows without text are not decided, the first is line %d",
                path,
                len(blank),
                blank[0],
            )
    if not any(queries):
        raise DataError(f"{path} holds no text")
    return queries
