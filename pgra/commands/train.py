"""Makes runs (`pgra train`, `icl`) and uses them: `evaluate`, `predict`, `push`, `verify`."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands import common
from pgra.commands.index import TextArguments
from pgra.config import Arguments, Defaults, arg, parse_arguments
from pgra.data.read import TABLES, check_file, read_lines, read_table
from pgra.errors import (
    ArtifactError,
    ConfigError,
    DamageError,
    DataError,
    check_alone,
    visible,
)
from pgra.methods.arguments import RunArguments

if TYPE_CHECKING:
    from pgra.runs import Answer

logger = logging.getLogger(__name__)

_PAPER_LM = "facebook/opt-13b"


def main(argv: Sequence[str] | None = None) -> int:
    r"""Train a reader on a task with evidence that an LM picked, or run another method.

    Examples:
      pgra train --config small --task sst2 --dataset_name bundled:rotten-tomatoes
      accelerate launch -m pgra train --task sst2 --config paper
      pgra train --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \
          --model_name_or_path bundled:t5-small-titles --num_evidence 4 --max_steps 40
      pgra train --task my_task.yaml --train_file train.jsonl --test_file test.jsonl --dry_run
      pgra train --task sst2 --method fid --seeds 0 1 2
      pgra train --task sst2 --method ralm --reader_lm bundled:smollm2-135m
      pgra train --config lm-bff --task sst2 --seeds 13 21 42 87 100
      pgra train --task sst2 --report_to tensorboard
      pgra train --method knn --help

    --method fid trains Fusion-in-Decoder on the first stage's best, plain the reader without
    evidence, random on random passages; icl, kate and knn train nothing. What distinguishes them
    may be given as flags too (--reranker none, --num_evidence 0). A stopped run resumes when the
    same command is given again.
    """
    return _run(argv, prog="pgra train", command=main)


def icl(argv: Sequence[str] | None = None) -> int:
    r"""Let a frozen LM decide queries after labelled examples (KATE).

    Examples:
      pgra icl --task sst2 --exemplars knn --num_exemplars 8 --lm bundled:smollm2-135m \
          --encoder bundled:minilm-l6
      pgra icl --task sst2 --exemplars random --redraw --seeds 0 1 2 3 4 --lm facebook/opt-13b
      pgra icl --task sst2 --exemplars knn --farthest --vector_metric euclidean --pooling cls \
          --encoder FacebookAI/roberta-large --lm facebook/opt-13b
      pgra icl --task sst2 --lm openai:MODEL --base_url http://localhost:8000/v1
      accelerate launch --num_processes 8 -m pgra icl --task sst2 --lm facebook/opt-13b
      pgra report runs/ --baseline icl-random

    The same as pgra train --method kate. Vectors, neighbors and answers are kept in
    --artifacts_dir: what was stopped resumes, and another run asks only what is new.
    """
    under = {"method": "kate", "output_dir": "runs/{task}-{method}"}
    return _run(argv, prog="pgra icl", command=icl, under=under)


def _run(
    argv: Sequence[str] | None,
    *,
    prog: str,
    command: Callable[..., int],
    under: Mapping[str, Any] | None = None,
) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    context = common.join_run(words)
    args, (series,) = common.parse_run(
        words,
        [common.SeriesArguments],
        prog=prog,
        **common.about(command),
        under=[Defaults(prog, under or {})],
    )
    from pgra.methods.base import fill_folder
    from pgra.runs import run, run_seeds

    common.quiet_libraries()
    if series.dry_run:
        from pgra.experiments.dry_run import show_plan

        check_alone(f"{prog} --dry_run")
        common.say(show_plan(args))
        return 0
    if context.is_main and not common.given_names(words) & {"config", "lm", "profile"}:
        _ask_for_paper_models(args)
    args = fill_folder(args)
    if series.seeds:
        shown = common.show_seeds(run_seeds(args, series.seeds, context))
    else:
        shown = common.show_metrics(run(args, context))
    if context.is_main:
        common.say(shown)
    return 0


def _ask_for_paper_models(args: RunArguments) -> None:
    """Say what a bare command loads, and ask where a person sits at a terminal."""
    stage = args.sections.get("rerank")
    if stage is None or stage.lm != _PAPER_LM or stage.reranker != "prompted":
        return
    from huggingface_hub import try_to_load_from_cache

    is_there = try_to_load_from_cache(_PAPER_LM, "config.json")
    if is_there or not (args.data.task and stage.num_evidence):
        return
    logger.warning(
        f"this loads the paper's models: {_PAPER_LM} (26 GB), google-bert/bert-base-uncased and "
        "google-t5/t5-base (1.3 GB), for a GPU of 48 GB. --config small takes small bundled ones."
    )
    if sys.stdin.isatty() and input("Load them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was loaded: give --config small, or models of your own (--lm)")


@dataclass(kw_only=True)
class EvaluateArguments(Arguments):
    """Which run, and on what."""

    run: str = arg("", "Folder of a finished run.", must_be_given=True)
    split: str = arg(
        "test", "test, or dev (the part a checkpoint was chosen on).", choices=("dev", "test")
    )
    test_file: str | None = arg(None, "Another file to measure on; needs --output_dir.")
    output_dir: str | None = arg(None, "Where results go; default: the run (of its own test set).")
    decode: str | None = arg(
        None, "verbalizer or official; default: the run's. Needs --output_dir."
    )
    device: str | None = arg(None, "auto, cpu, cuda, ...; default: the run's.")
    artifacts_dir: str | None = arg(None, "Folder of indexes and banks; default: the run's.")

    def check(self) -> None:
        elsewhere = self.test_file or self.decode or self.split == "dev"
        if elsewhere and self.output_dir is None:
            raise ConfigError("the run's folder has its own test set's results: give --output_dir")


def evaluate(argv: Sequence[str] | None = None) -> int:
    """Measure a finished run on its test set, or on another file.

    Examples:
      pgra evaluate --run runs/sst2-pgra-seed42
      pgra evaluate --run runs/sst2-pgra-seed42 --test_file other.jsonl --output_dir runs/other
    """
    (args,) = parse_arguments(
        [EvaluateArguments], argv, prog="pgra evaluate", **common.about(evaluate)
    )
    common.quiet_libraries()
    from pgra.context import join_context
    from pgra.runs import evaluate_run

    names = ("test_file", "decode", "device", "artifacts_dir")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    changes["allow_test_in_train"] = True  # to measure on what was trained on is noted
    context = join_context(args.device or "auto")
    target = None if args.output_dir is None else Path(args.output_dir)
    measured = evaluate_run(
        Path(args.run), context, split=args.split, changes=changes, output_dir=target
    )
    if context.is_main:
        common.say(common.show_metrics(measured))
    return 0


def as_json(answer: "Answer") -> dict[str, Any]:
    """Return an answer as `predictions.jsonl` has it."""
    fields = dict(answer.query.fields)
    return {
        "text": answer.text,
        **({"fields": fields} if len(fields) > 1 else {}),
        "prediction": answer.label,
        "scores": dict(answer.scores),
        "evidence": [asdict(each) for each in answer.evidence],
        **answer.details,
    }


def show(answer: "Answer", num_shown: int) -> str:
    """Lay out an answer for a person."""
    best = sorted(answer.scores.items(), key=lambda item: -item[1])
    scores = ", ".join(f"{name} {score:.3f}" for name, score in best)
    lines = [f"query: {answer.text}", f"label: {answer.label}"]
    lines[1] += f"  (probabilities: {scores})" if scores else ""
    exemplars = answer.exemplars[:num_shown]
    evidence = answer.evidence[:num_shown]
    if exemplars:
        number = len(answer.exemplars)
        lines.append(f"exemplars, {len(exemplars)} of {number}, in the prompt's order:")
        lines += [f"  {shown.label}: {shown.text}" for shown in exemplars]
    if evidence:
        lines.append(f"evidence, {len(evidence)} of {len(answer.evidence)}, best first:")
        lines.append("  stage-1 rank    score  stage-2 score  passage")
    for line in evidence:
        head = f"  {line.stage1_rank:>12}{line.stage1_score:>9.3f}{line.score:>15.3f}"
        lines.append(f"{head}  {line.text}")
    return "\n".join(lines)


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


def predict(argv: Sequence[str] | None = None) -> int:
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
        common.name_leading("--text", argv),
        prog="pgra predict",
        **common.about(predict),
    )
    if bool(texts.text) == bool(args.file):
        raise ConfigError("give texts (pgra predict 'a text' --run RUN) or --file FILE, not both")
    common.quiet_libraries()
    from pgra.runs import Run

    run = Run.load(args.run, device=args.device, artifacts_dir=args.artifacts_dir)
    inputs = run.method.data.task.inputs
    queries = texts.text or read_queries_file(Path(args.file), inputs)
    answers = iter(run.predict([query for query in queries if query is not None]))
    found = [None if query is None else next(answers) for query in queries]
    if args.json:
        rows = [None if answer is None else as_json(answer) for answer in found]
        common.say("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        texts = ["query: -" if one is None else show(one, args.num_shown) for one in found]
        common.say(visible("\n\n".join(texts)))
    return 0


def read_queries_file(path: Path, inputs: Sequence[str]) -> list[str | Mapping[str, str] | None]:
    """Read queries from a file; None is a row without text, and blank lines are skipped.

    The file is .txt with a text a line, or .jsonl, .csv or .tsv with the inputs by name; `.gz` or
    `.zst` may follow.

    Raises:
        DataError: If it cannot be read, holds none, or a line lacks an input.
    """
    queries: list[str | Mapping[str, str] | None] = []
    if check_file(path, ("txt", *TABLES)) == "txt":
        queries += [text for line in read_lines(path) if (text := line.strip())]
    else:
        for record in read_table(path):
            fields = {name: record.text(name) for name in inputs}
            queries.append(fields if any(fields.values()) else None)
    if not any(queries):
        raise DataError(f"{path} holds no text")
    return queries


@dataclass(kw_only=True)
class PushArguments(Arguments):
    """Which run, and where to."""

    run: str = arg("", "Folder of a finished run of pgra train.", must_be_given=True)
    hub_model_id: str | None = arg(
        None, "OWNER/NAME; a name alone is your own; default: the folder's name."
    )
    hub_private_repo: bool = arg(False, "Make a new repository private; default: as the hub does.")


def push(argv: Sequence[str] | None = None) -> int:
    """Put a finished run's reader on the hub, with its model card.

    Example:
      pgra push --run runs/sst2-pgra-seed42 --hub_model_id me/sst2-pgra

    The reader's folder is uploaded with its model card (README.md); checkpoints are not. The token
    is HF_TOKEN, or your login's.
    """
    (args,) = parse_arguments([PushArguments], argv, prog="pgra push", **common.about(push))
    common.quiet_libraries()
    from pgra.model_card import push_run

    name = args.hub_model_id or Path(args.run).absolute().name
    common.say(f"pushed: {push_run(Path(args.run), name, private=args.hub_private_repo or None)}")
    return 0


@dataclass(kw_only=True)
class VerifyArguments(Arguments):
    """What is compared."""

    folders: list[str] = arg([], "Folders; they may also stand first, bare.", must_be_given=True)


def verify(argv: Sequence[str] | None = None) -> int:
    """Read every byte of artifacts and runs, and compare it with the checksums that were written.

    Whatever lies below a folder is looked at: indexes, corpora, banks, runs, readers, checkpoints.
    Opening one compares all of it up to 1 GB, and the sizes of a larger one. Exit code 1 where a
    file is damaged; it is named.

    Examples:
      pgra verify artifacts runs
      pgra verify artifacts/indexes/minilm-l6-0123456789ab
    """
    words = common.name_leading("--folders", argv)
    (args,) = parse_arguments([VerifyArguments], words, prog="pgra verify", **common.about(verify))
    from pgra.artifacts import RECORDS, find_damage, read_sealed

    num_records = 0
    damage = []
    for path in sorted(path for folder in args.folders for path in Path(folder).rglob("*.json")):
        if not RECORDS.fullmatch(path.name):  # such as the JSON of a model
            continue
        num_records += 1
        try:
            files = read_sealed(path).get("files", {})
        except DamageError as error:
            damage.append(error.what)
        else:
            found = find_damage(path.parent, files)
            damage += [f"{path.parent / name} {what}" for name, what in found]
    where = ", ".join(args.folders)
    if not num_records:
        raise ArtifactError(f"{where} has no checksums: give artifacts, runs, or what holds some")
    state = f"{len(damage)} files are damaged" if damage else "all as written"
    common.say("\n".join([f"{where}: {num_records} records of files, {state}", *damage]))
    return int(bool(damage))
