"""Counts what a run's second stage has yet to read, and how long that takes here: `pgra plan`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import about, parse_stages, quiet_libraries, say
from pgra.config import Arguments, arg
from pgra.errors import ConfigError
from pgra.methods.arguments import PgraArguments

if TYPE_CHECKING:
    from pgra.core import Example, Rows
    from pgra.methods.stages import Stages

_TIMED = 2  # batches: the first loads the model and is slow
_ROWS = 150  # passages of a batch at most


@dataclass(kw_only=True)
class PlanArguments(Arguments):
    """How a plan is made."""

    timed: bool = arg(True, "Read two batches to time them.", off="Count only; no model is loaded.")
    json: str | None = arg(None, "File that gets the same as numbers, as JSON.", writes=True)


@dataclass(frozen=True)
class Plan:
    """What a task's second stage has yet to read.

    Attributes:
        queries: Their number by split.
        pairs: Pairs of a query and a candidate.
        to_read: Texts, or pairs where each is read with its query; None where that is not known.
        texts_per_second: Of the second of two batches; None where nothing was timed.
    """

    task: str
    queries: Mapping[str, int]
    pairs: int
    to_read: int | None
    texts_per_second: float | None = None

    @property
    def seconds(self) -> float | None:
        """Reading time on one device like this one; None where it is not known."""
        if self.to_read is None or (self.to_read and self.texts_per_second is None):
            return None
        return self.to_read / self.texts_per_second if self.texts_per_second else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    r"""Run the first stage, and count what the second has yet to read.

    Example:
      pgra plan --task sst2 --dataset_name bundled:rotten-tomatoes --corpus bundled:wikipedia-19k \
          --encoder bundled:minilm-l6 --lm bundled:smollm2-135m --max_train_samples 32 \
          --json plan.json

    Takes the flags of pgra train but for the reader's training. The index is built and candidates
    are found as by the run, which then finds them there. Two batches are read to time them; they
    are kept too.
    """
    sections, (how,) = parse_stages(argv, [PlanArguments], prog="pgra plan", **about(main))
    args = PgraArguments(**sections)
    if args.rerank.num_evidence == 0 or args.rerank.reranker == "none":
        raise ConfigError(
            "the LM has nothing to read with --num_evidence 0 or --reranker none: "
            "plan a run with --reranker prompted"
        )
    from pgra.artifacts import write_json
    from pgra.core import ALONE
    from pgra.methods.stages import Stages

    quiet_libraries()
    plan = make_plan(Stages.read(args, ALONE), timed=how.timed)
    if how.json is not None:
        write_json(Path(how.json), {**vars(plan), "seconds": plan.seconds})
    say(describe_plan(plan, args.rerank.reranker))
    return 0


def make_plan(stages: "Stages", *, timed: bool) -> Plan:
    """Run the first stage, and count what the second has yet to read."""
    import numpy as np

    from pgra.core import MISSING_ROW
    from pgra.methods.base import SPLITS

    stages.open()
    # What exhaustive search reads is the whole corpus.
    is_whole = stages.args.retriever.retriever == "exhaustive"
    rows = np.arange(len(stages.corpus))[None] if is_whole else stages.find_candidates()
    splits = {split: stages.data.examples(split) for split in SPLITS}
    examples = [example for split in SPLITS for example in splits[split]]
    to_read = stages.reranker.count_missing(examples, rows)
    plan = Plan(
        task=stages.data.task.name,
        queries={split: len(own) for split, own in splits.items()},
        pairs=int((rows != MISSING_ROW).sum()) * (len(examples) if is_whole else 1),
        to_read=to_read,
    )
    if not timed or not to_read:
        return plan
    return replace(plan, texts_per_second=time_batches(stages, examples, rows))


def time_batches(stages: "Stages", examples: "Sequence[Example]", rows: "Rows") -> float | None:
    """Return the texts a second of the second of two batches; what they read is kept."""
    from pgra.methods.stages import Stages

    # The same bank without what a similarity is fitted to.
    plain = replace(stages.args.rerank, similarity="dot")
    bare = Stages.read(replace(stages.args, rerank=plain), stages.context)
    parts = [rows[:, i : i + _ROWS] for i in range(0, rows.shape[1], _ROWS)]
    batches = [(examples[i : i + 1], part[i : i + 1]) for i in range(len(rows)) for part in parts]
    rate, num_timed = None, 0
    for batch in batches:
        work = bare.reranker.prepare(*batch)
        if not work.num_new:
            continue
        rate, num_timed = work.num_new / work.seconds, num_timed + 1
        if num_timed == _TIMED:
            break
    bare.release()
    return rate


def describe_plan(plan: Plan, reranker: str) -> str:
    splits = ", ".join(f"{split} {count:,}" for split, count in plan.queries.items())
    lines = [
        f"plan of {plan.task} with --reranker {reranker}",
        f"  queries  {sum(plan.queries.values()):,} ({splits})",
        f"  pairs    {plan.pairs:,}",
    ]
    if plan.to_read is None:
        return "\n".join([*lines, f"  what {reranker} reads is not known"])
    lines.append(f"  to read  {plan.to_read:,} texts that were not read before")
    if plan.seconds is not None:
        rate = "" if plan.texts_per_second is None else f", {plan.texts_per_second:,.1f} texts/s"
        lines.append(f"  time     {_time(plan.seconds)} on one device like this one{rate}")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
