"""Before a run: what its second stage has yet to read, and what evidence is worth to its reader."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.artifacts import write_json
from pgra.commands.common import about, name_leading, parse_run, quiet_libraries, say
from pgra.commands.report import consistency
from pgra.config import Defaults
from pgra.errors import ConfigError
from pgra.methods.arguments import RunArguments, WorthArguments

if TYPE_CHECKING:
    from pgra.arrays import Rows
    from pgra.methods.stages import Stages
    from pgra.types import Example

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
        if self.to_read is None or (self.to_read and self.texts_per_second is None):
            return None
        return self.to_read / self.texts_per_second if self.texts_per_second else 0.0


def show_plan(args: RunArguments) -> str:
    """Run a run's first stage, and say what the second has yet to read and how long that takes.

    The index is built and candidates are found as by the run, which then finds them there. Two
    batches are read to time them; they are kept too.

    Raises:
        ConfigError: If the run has no second stage.
    """
    if (
        "rerank" not in args.sections
        or not args.rerank.num_evidence
        or args.rerank.reranker == "none"
    ):
        raise ConfigError(
            "--dry_run counts what a second stage has yet to read, and this run has none: "
            "leave out --dry_run"
        )
    from pgra.context import ALONE
    from pgra.methods.stages import Stages

    plan = make_plan(Stages.read(args, ALONE))
    lines = [f"dry run: {plan.queries:,} queries, {plan.pairs:,} pairs with a candidate"]
    if plan.to_read is None:
        lines.append(f"what {args.rerank.reranker} reads is not known")
    else:
        lines.append(f"to read: {plan.to_read:,} texts that were not read before")
    if plan.seconds is not None:
        lines.append(f"time: {plan.seconds / 60:,.1f} minutes on one device like this one")
    return "\n".join(lines)


def make_plan(stages: "Stages", *, timed: bool = True) -> Plan:
    """Run the first stage, and count what the second has yet to read."""
    from pgra.types import MISSING_ROW

    stages.open()
    examples, rows = stages.wanted()
    to_read = stages.reranker.count_missing(examples, rows)
    is_whole = stages.args.retriever.retriever == "exhaustive"  # of the corpus
    pairs = int((rows != MISSING_ROW).sum()) * (len(examples) if is_whole else 1)
    plan = Plan(len(examples), pairs, to_read)
    if not timed or not to_read:
        return plan
    return replace(plan, texts_per_second=time_batches(stages, examples, rows))


def time_batches(stages: "Stages", examples: "Sequence[Example]", rows: "Rows") -> float | None:
    """Return the texts a second of the second of two batches; what they read is kept."""
    from pgra.methods.stages import Stages

    # The same bank without what a similarity is fitted to.
    plain = replace(stages.args.rerank, similarity="dot")
    bare = Stages.read(stages.args.having(rerank=plain), stages.context)
    parts = [rows[:, i : i + _ROWS] for i in range(0, rows.shape[1], _ROWS)]
    batches = [(examples[i : i + 1], part[i : i + 1]) for i in range(len(rows)) for part in parts]
    rate = None
    num_timed = 0
    for batch in batches:
        work = bare.reranker.prepare(*batch)
        if not work.num_new:
            continue
        rate = work.num_new / work.seconds
        num_timed = num_timed + 1
        if num_timed == _TIMED:
            break
    bare.release()
    return rate


def worth(argv: Sequence[str] | None = None) -> int:
    r"""Measure what evidence is worth to a reader: before it is trained, or of finished runs.

    Examples:
      pgra worth --task sst2 --dataset_name bundled:rotten-tomatoes --max_train_samples 208 \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \
          --model_name_or_path bundled:t5-small-titles --num_candidates 50
      pgra worth --task sst2 --method ralm --reader_lm bundled:smollm2-135m --sources first_stage
      pgra worth --task sst2 --reranker cross-encoder --json worth.json
      pgra worth runs/plain runs/fid runs/pgra --output_dir runs/consistency

    Takes the flags of pgra train. For 64 to 400 training queries, sources of evidence and numbers
    of evidence: the bits that the evidence adds to the log-probability of the right label, after a
    temperature and a bias a label, cross-fitted, with evidence and without. The last line has the
    flags to train with; pgra train --evidence auto takes them itself. Of finished runs: how often
    evidence has the label of its query (pgra worth RUNS --help).
    """
    words = name_leading("--runs", argv)
    if words[:1] == ["--runs"]:
        return consistency(words)
    args, (how,) = parse_run(
        words,
        [WorthArguments],
        prog="pgra worth",
        defaults=[Defaults("pgra worth", {"evidence": "auto"}, wins=True)],
        **about(worth),
    )
    quiet_libraries()
    from pgra.context import Context
    from pgra.methods.worth import measure_worth, worth_table

    context = Context(artifacts=Path(args.runtime.artifacts_dir), device=args.runtime.device)
    found = measure_worth(args, how, context)
    if how.json not in (None, "-"):
        write_json(Path(how.json), found)
    say(json.dumps(found, indent=2) if how.json == "-" else worth_table(found).to_text())
    return 0
