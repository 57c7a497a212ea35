"""Before runs: whether their models and data answer, and what is yet to be read, how long."""

from collections.abc import Sequence

from pgra.arrays import Rows
from pgra.context import ALONE
from pgra.data.corpus import find_source
from pgra.errors import ConfigError, PgraError, one_line
from pgra.lm.load import find_model
from pgra.methods.arguments import RunArguments
from pgra.methods.base import SPLITS, TaskData, find_method
from pgra.methods.stages import Stages
from pgra.types import MISSING_ROW, Example

_TIMED = 2  # batches: the first loads the model and is slow


def show_plan(args: RunArguments) -> str:
    """Run a run's first stage; describe what the second has yet to read and how long that takes.

    The index is built and candidates are found as by the run, which then finds them there. Two
    batches are read to time them; they are kept too.

    Raises:
        ConfigError: If the run has no second stage.
    """
    rerank = args.sections.get("rerank")
    if rerank is None or not rerank.num_evidence or rerank.reranker == "none":
        raise ConfigError(
            "--dry_run counts what a second stage has yet to read, and this run has none: "
            "leave out --dry_run"
        )
    stages = Stages.read(args, ALONE)
    stages.open()
    examples, rows = stages.wanted()
    to_read = stages.reranker.count_missing(examples, rows)
    num_pairs = int((rows != MISSING_ROW).sum())
    lines = [f"dry run: {len(examples):,} queries, {num_pairs:,} pairs with a candidate"]
    if to_read is None:
        return "\n".join([*lines, f"what {rerank.reranker} reads is not known"])
    lines.append(f"to read: {to_read:,} texts that were not read before")
    rate = _time_batches(stages, examples, rows) if to_read else None
    if rate or not to_read:
        minutes = to_read / (rate or 1) / 60
        lines.append(f"time: {minutes:,.1f} minutes on one device like this one")
    return "\n".join(lines)


def _time_batches(stages: Stages, examples: Sequence[Example], rows: Rows) -> float | None:
    """Return the texts a second of the second of two batches; what they read is kept."""
    # The same bank without what a similarity is fitted to.
    bare = Stages.read(stages.args.change("rerank", similarity="dot"), stages.context)
    rates: list[float] = []
    for i in range(len(rows)):
        if len(rates) < _TIMED:
            work = bare.reranker.prepare(examples[i : i + 1], rows[i : i + 1])
            if work.num_new:
                rates.append(work.num_new / work.seconds)
    bare.release()
    return rates[-1] if rates else None


def check_sources(runs: Sequence[RunArguments]) -> tuple[list[str], int]:
    """Look for the data and models of runs; return a line each, and how many are missing.

    The line has the rows, or the commit or checksum that answers, and how many runs need it.
    """
    users: dict[tuple[str, str], list[RunArguments]] = {}
    for args in runs:
        for source in find_method(args.runtime.method).sources(args):
            users.setdefault(source, []).append(args)
    lines = []
    num_missing = 0
    for (kind, name), needing in users.items():
        try:
            answer = _look_for(kind, name, needing[0])
        except PgraError as error:
            answer = f"MISSING: {one_line(error)}"
            num_missing += 1
        lines.append(f"{kind} {name}: {answer} ({len(needing)} runs)")
    return lines, num_missing


def _look_for(kind: str, name: str, args: RunArguments) -> str:
    if kind == "model":
        return find_model(name).identity
    if kind == "corpus":
        return find_source(name).identity
    data = TaskData.read(args, is_trained="icl" not in args.sections)
    return ", ".join(f"{split} {len(data.examples(split)):,}" for split in SPLITS)
