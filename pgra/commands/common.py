"""What several commands share."""

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.config import Arguments, arg, field_names, parse_sections
from pgra.context import ALONE, Context, join_context
from pgra.data.examples import DataArguments
from pgra.errors import ConfigError, check_alone
from pgra.methods.arguments import METHODS, STAGES, RunArguments, RuntimeArguments
from pgra.parallel import Worker
from pgra.reader.arguments import TrainingArguments
from pgra.types import as_query

if TYPE_CHECKING:
    from pgra.runs import Run

logger = logging.getLogger(__name__)

# The argument classes of PGRA's stages and readers, by their names in `RunArguments`.
SECTIONS: dict[str, Any] = {"runtime": RuntimeArguments, "data": DataArguments, **STAGES}


@dataclass(kw_only=True)
class SeriesArguments(Arguments):
    """Several runs in one command."""

    GROUP = "Training"

    seeds: list[int] | None = arg(
        None,
        "Run once with each of these seeds, such as 0 1 2; mean and spread are shown; over --seed.",
        decides=False,
        is_common=True,
        least=0,
        most=(1 << 32) - 1,
        is_distinct=True,
    )
    dry_run: bool = arg(
        False,
        "Run the first stage, count what the second has yet to read, time it, and stop.",
        decides=False,
        is_common=True,
    )


@dataclass(kw_only=True)
class WorkArguments(Arguments):
    """Who shares the work, without `accelerate launch`."""

    shard: str | None = arg(
        None,
        "I/N: do what part I, from 0, of N has to do, then what slow parts have left, and end. The "
        "same command without it continues from there.",
    )

    def join(self, device: str, artifacts: Path = ALONE.artifacts) -> Context:
        """Return the context of this part of the job, or else that of `accelerate launch`."""
        if self.shard is None:
            return join_context(device, artifacts)
        check_alone("--shard")
        rank, _, world = self.shard.partition("/")
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            raise ConfigError(f"--shard {self.shard!r} is not I/N, such as 0/8 to 7/8")
        worker = Worker(int(rank), int(world), is_part=True)
        return Context(worker, artifacts=artifacts, device=device)


@dataclass(kw_only=True)
class TextArguments(Arguments):
    """What is looked up."""

    text: list[str] = arg([], "Texts, each in quotes; they may also stand first, bare.")

    def check(self) -> None:
        for text in self.text:
            as_query("--text", text)


def all_arguments() -> set[str]:
    """Return the names of all arguments that a YAML for several programs may hold."""
    return field_names([*SECTIONS.values(), SeriesArguments, TrainingArguments])


def about(command: Callable[..., object]) -> dict[str, Any]:
    """Return a command's help above and below its flags: its function's docstring."""
    first, _, rest = (getdoc(command) or "").partition("\n\n")
    return {"description": first, "epilog": rest}


def name_leading(flag: str, words: Sequence[str]) -> list[str]:
    """Put a flag before leading bare words, so that `pgra search "a sentence"` works."""
    return [flag, *words] if words and not words[0].startswith("-") else [*words]


def parse(
    command: Callable[..., object],
    classes: Sequence[type],
    words: Sequence[str],
    prog: str = "",
    **others: Any,
) -> tuple[Any, ...]:
    """Read a command's arguments: its help is its docstring, and its name is its file's.

    `others` are as in `parse_sections`.
    """
    prog = prog or f"pgra {command.__module__.rpartition('.')[2]}"
    named = {cls.__name__: cls for cls in classes}
    sections = parse_sections(lambda _: named, words, prog=prog, **about(command), **others)
    return tuple(sections.values())


def parse_run(
    command: Callable[..., object],
    prog: str,
    words: Sequence[str],
    more: Sequence[type] = (),
    *,
    others: Collection[str] = (),
    **layers: Any,
) -> tuple[RunArguments, list[Any]]:
    """Read the arguments of a run and of its method, and one instance of each of `more`.

    `others` is for words of several runs, such as a grid's: all arguments that they may have. What
    this run does not have is then ignored, and what its method decides otherwise gives way.
    `layers` are as in `parse_sections`.
    """
    from pgra.methods.base import fill_folder, find_sections, refuse_contradictions

    every = set(others)
    for entry in METHODS.values():
        every |= field_names(entry.sections.values())
    is_shared = bool(others)
    layers |= {"others": every, "is_shared": is_shared}
    sections, rest = parse_chosen(command, prog, words, find_sections, more, **layers)
    names = given_names(words)
    if not is_shared:
        refuse_contradictions(names, sections)
        for name in sorted(names & every - field_names(map(type, [*sections.values(), *rest]))):
            logger.warning("--%s is of another method: it is not used", name)
    return fill_folder(RunArguments(sections)), rest


def parse_chosen(
    command: Callable[..., object],
    prog: str,
    words: Sequence[str],
    find: Callable[[Mapping[str, Any]], Mapping[str, type]],
    more: Sequence[type],
    *,
    others: Collection[str] = (),
    is_shared: bool = False,
    **layers: Any,
) -> tuple[dict[str, Any], list[Any]]:
    """Read the sections that `find` returns for the classes that are chosen, and `more`."""
    from pgra.methods.base import known_options

    options = known_options()

    def find_all(chosen: Mapping[str, Any]) -> dict[str, type]:
        sections = {**find(chosen), **{cls.__name__: cls for cls in more}}
        strange = given_names(words) & {*options} - field_names(sections.values())
        if strange and not is_shared:
            name = min(strange)
            raise ConfigError(f"--{name} is of {options[name]}: add that, or leave {name} out")
        return sections

    texts = {"prog": prog, **about(command)}
    sections = parse_sections(find_all, words, others={*others, *options}, **texts, **layers)
    return sections, [sections.pop(cls.__name__) for cls in more]


def given_names(words: Sequence[str]) -> set[str]:
    """Return the names of the arguments that are given as flags."""
    flags = [word for word in words if word.startswith("--")]
    return {flag[2:].partition("=")[0] for flag in flags}


def say(text: str) -> None:
    """Print it, with an escape for what standard output cannot write (such as an ASCII one)."""
    coding = sys.stdout.encoding or "utf-8"
    text = text.encode(coding, "backslashreplace").decode(coding)
    print(text, flush=True)  # noqa: T201 (the one place that prints)


def typed_lines() -> Iterator[str]:
    """Yield what is typed after a prompt, until Ctrl-D, or what comes through a pipe."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is not UTF-8 is refused by the line
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in iter(sys.stdin.readline, ""))
        return
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")


def quiet_libraries() -> None:
    """Silence libraries' progress and warnings, but for the hub's downloads; with -v all report."""
    if logging.getLogger("pgra").isEnabledFor(logging.DEBUG):
        return
    from pgra.progress import hide_transformers

    # Told where they take more than two seconds to load.
    timer = threading.Timer(2.0, logger.info, ["loading torch and transformers ..."])
    timer.daemon = True
    timer.start()
    with contextlib.suppress(ImportError):  # the memory does without
        hide_transformers()
        import datasets

        datasets.disable_progress_bars()
    timer.cancel()
    logging.getLogger("faiss").setLevel(logging.WARNING)


def show_metrics(run: "Run") -> str:
    values = run.metrics
    interval = ""
    if values["interval_95"]:
        low, high = values["interval_95"]
        interval = f"95 % interval {low:.4f} to {high:.4f}, "
    line = (
        f"{run.folder}: {values['task']} {values['split']} {values['metric']} "
        f"{values['value']:.4f} ({interval}n = {values['n']}, seed {values['seed']})"
    )
    for name, value in values["metrics"].items():
        if name == "f1" or "@" in name:  # of questions
            line += f", {name} {value:.4f}"
    if run.reused:
        line += " (reused)"
    return "\n".join([line, *(f"note: {note}" for note in values["notes"])])


def show_seeds(runs: "Mapping[int, Run]") -> str:
    """Show each run, their mean and spread, and the notes of all."""
    from pgra.report.tables import with_sd

    lines = []
    notes: list[str] = []
    for run in runs.values():
        line, *more = show_metrics(run).splitlines()
        lines.append(line)
        notes += [note for note in more if note not in notes]
    values = [float(run.metrics["value"]) for run in runs.values()]
    seeds = " ".join(map(str, runs))
    mean = f"{with_sd(values, '.4f')} (mean ± sample sd of {len(runs)} seeds: {seeds})"
    return "\n".join([*lines, mean, *notes])
