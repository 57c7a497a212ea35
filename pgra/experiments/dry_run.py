"""Before a run: what its second stage has yet to read, and how long that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pgra.arrays import Rows
from pgra.context import ALONE
from pgra.errors import ConfigError
from pgra.methods.arguments import RunArguments
from pgra.methods.stages import Stages
from pgra.types import MISSING_ROW, Example

_TIMED = 2  # batches: the first loads the model and is slow
_ROWS = 150  # passages of a batch at most


@dataclass(frozen=True)
class Plan:
    """What a task's second stage has yet to read.

    Attributes:
        queries: Their number.
        pairs: Pairs of a query and a candidate.
        to_read: Texts, or pairs where each is read with its query; None where that is not known.
        texts_per_second: Of the second of two batches; None where nothing was timed.
    """

    queries: int
    pairs: int
    to_read: int | None
    texts_per_second: float | None = None

    @property
    def seconds(self) -> float | None:
        """Reading time on one device like this one; None where it is not known."""
        if self.to_read == 0:
            return 0.0
        if self.to_read is None or self.texts_per_second is None:
            return None
        return self.to_read / self.texts_per_second


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
    plan = make_plan(Stages.read(args, ALONE))
    lines = [f"dry run: {plan.queries:,} queries, {plan.pairs:,} pairs with a candidate"]
    if plan.to_read is None:
        lines.append(f"what {rerank.reranker} reads is not known")
    else:
        lines.append(f"to read: {plan.to_read:,} texts that were not read before")
    if plan.seconds is not None:
        lines.append(f"time: {plan.seconds / 60:,.1f} minutes on one device like this one")
    return "\n".join(lines)


def make_plan(stages: Stages, *, timed: bool = True) -> Plan:
    """Run the first stage, and count what the second has yet to read."""
    stages.open()
    examples, rows = stages.wanted()
    to_read = stages.reranker.count_missing(examples, rows)
    num_pairs = int((rows != MISSING_ROW).sum())
    if len(rows) < len(examples):  # one line for all
        num_pairs *= len(examples)
    plan = Plan(len(examples), num_pairs, to_read)
    if not timed or not to_read:
        return plan
    return replace(plan, texts_per_second=_time_batches(stages, examples, rows))


def _time_batches(stages: Stages, examples: Sequence[Example], rows: Rows) -> float | None:
    """Return the texts a second of the second of two batches; what they read is kept."""
    # The same bank without what a similarity is fitted to.
    plain = replace(stages.args.rerank, similarity="dot")
    bare = Stages.read(stages.args.having(rerank=plain), stages.context)
    rates: list[float] = []
    for i in range(len(rows)):
        for start in range(0, rows.shape[1], _ROWS):
            if len(rates) < _TIMED:
                batch = rows[i : i + 1, start : start + _ROWS]
                work = bare.reranker.prepare(examples[i : i + 1], batch)
                if work.num_new:
                    rates.append(work.num_new / work.seconds)
    bare.release()
    return rates[-1] if rates else None
