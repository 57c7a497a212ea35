"""Decides new texts with a trained run, and shows the evidence: `pgra predict`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.arguments import parse_arguments
from pgra.commands.common import quiet_libraries, say
from pgra.commands.texts import TextArguments, name_leading_texts
from pgra.config import at_least
from pgra.data.textfile import check_file, read_lines, read_records
from pgra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pgra.evaluation.results import EvidenceLine
    from pgra.pipelines.predict import Answer

EXAMPLE = """examples:
  pgra predict "A warm and funny film." --run runs/sst2-pgra-seed42
  pgra predict --run runs/sst2-pgra-seed42 --file new.txt --json > answers.jsonl
  pgra predict "A warm and funny film." --run runs/sst2-pgra-seed42 --attention

The run's own index, bank and prompt find the evidence; no training data is read (but
with exemplars knn, for the text's own neighbors). Shown are the
label, the probability of each, and for each evidence its rank and score in stage 1, its score in
stage 2 and its text. The LM reads a new text once, for its state is kept in the run's bank of
queries, and those candidates that no run has read yet.

From Python, with evidence of your own:
  pgra.Reader.load("runs/sst2-pgra-seed42").predict(texts, evidence)
"""


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class PredictArguments:
    """Which run, on what, and how much is shown."""

    run: str | None = _arg(None, "Folder of a finished run of train.py, or of its reader/.")
    file: str | None = _arg(
        None, "A text a line (.txt), or an object with the task's inputs a line (.jsonl)."
    )
    json: bool = _arg(False, "One JSON object a query, as in predictions.jsonl.")
    num_shown: int = _arg(5, "Evidence shown for a text; --json gives all.")
    attention: bool = _arg(
        False, "Say what share of the reader's cross-attention each evidence gets."
    )
    device: str = _arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    artifacts_dir: str | None = _arg(None, "Folder of index and bank; default: the run's.")

    def __post_init__(self) -> None:
        """Refuse to do nothing."""
        if self.run is None:
            raise ConfigError("--run is missing: give the folder of a finished run of train.py")
        at_least("num_shown", self.num_shown, 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Decide texts."""
    texts, args = parse_arguments(
        [TextArguments, PredictArguments],
        name_leading_texts(argv),
        prog="pgra predict",
        description="Decide new texts with a trained run, and show the evidence.",
        epilog=EXAMPLE,
    )
    if bool(texts.text) == bool(args.file):
        raise ConfigError(
            "give either texts (pgra predict 'some text' --run RUN) or --file FILE"
            + (", not both" if args.file else "")
        )
    quiet_libraries()
    from pgra.pipelines.predict import Predictor
    from pgra.reader.record import read_record

    inputs = read_record(Path(args.run), verify=False).inputs
    queries = list(texts.text) if texts.text else read_queries(Path(args.file), inputs)
    predictor = Predictor.open(Path(args.run), artifacts_dir=args.artifacts_dir, device=args.device)
    answers = predictor.answer(queries, attention=args.attention)
    if args.json:
        say("\n".join(json.dumps(as_json(answer), ensure_ascii=False) for answer in answers))
    else:
        say("\n\n".join(show(answer, args.num_shown) for answer in answers))
    return 0


def read_queries(path: Path, inputs: Sequence[str]) -> list[str | Mapping[str, str]]:
    """Read queries from a file; blank lines are passed over.

    Args:
        path: .txt with a text a line, or .jsonl with the inputs by name (others are not looked at).
        inputs: The task's.

    Raises:
        DataError: If it cannot be read, holds none, or a line lacks an input.
    """
    if check_file(path, ("txt", "jsonl")) == "txt":
        texts = [line.text.strip() for line in read_lines(path)]
        queries: list[str | Mapping[str, str]] = [text for text in texts if text]
    else:
        queries = []
        for record in read_records(path):
            for name in inputs:
                if not isinstance(record.fields.get(name), str):
                    raise DataError(
                        f"{path}, line {record.line}: '{name}' is {record.fields.get(name)!r}, "
                        f"not text: the task's inputs are {', '.join(inputs)}"
                    )
            queries.append({name: str(record.fields[name]) for name in inputs})
    if not queries:
        raise DataError(f"{path} holds no text")
    return queries


def as_json(answer: "Answer") -> dict[str, Any]:
    """Give an answer as `predictions.jsonl` has it."""
    fields = dict(answer.query.fields)
    return {
        "text": answer.query.text,
        **({"fields": fields} if len(fields) > 1 else {}),
        "prediction": answer.prediction.label,
        "scores": dict(answer.prediction.scores),
        "evidence": [line.as_json() for line in answer.evidence],
    }


def show(answer: "Answer", num_shown: int) -> str:
    """Lay out an answer for a person."""
    chances = sorted(answer.prediction.scores.items(), key=lambda item: -item[1])
    told = ", ".join(f"{label} {chance:.3f}" for label, chance in chances)
    lines = [
        f"query: {answer.query.text}",
        f"label: {answer.prediction.label}  (probabilities: {told})",
    ]
    shown = answer.evidence[:num_shown]
    if shown:
        with_share = shown[0].attention is not None
        lines.append(f"evidence, {len(shown)} of {len(answer.evidence)}, best first:")
        share = "attention  " if with_share else ""
        lines.append(f"  stage-1 rank    score  stage-2 score  {share}passage")
        lines += [_show_line(line) for line in shown]
    return "\n".join(lines)


def _show_line(line: "EvidenceLine") -> str:
    share = "" if line.attention is None else f"{line.attention:>9.3f}  "
    head = f"  {line.stage1_rank:>12}{line.stage1_score:>9.3f}{line.score:>15.3f}  {share}"
    return f"{head}{line.text}"
