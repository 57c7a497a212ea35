"""Foresees what a task's second stage will cost, before it is run: `pgra plan`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import about, parse_stages, quiet_libraries, say
from pgra.config import Arguments, arg
from pgra.errors import ConfigError
from pgra.methods.arguments import PgraArguments

if TYPE_CHECKING:
    from pgra.lm.cost import Reading
    from pgra.plan import Plan
    from pgra.rerank.base import Cost

_PROCESSES = (2, 4, 8)
_POWERS = ("", "k", "M", "G", "T", "P", "E")  # of a thousand
_OPERATIONS = "2 x weights for a token, and attention"
_BASES = {
    "stored": "counted: the candidates are stored",
    "searched": "counted: the first stage was searched in memory",
    "sampled": "about: grown from a part of the queries",
    "trial": "about: from a small index of drawn passages",
    "guessed": "about, and rather fewer: as if candidates were drawn at random",
    "whole corpus": "counted: the LM reads the whole corpus",
    "every pair": "counted: each passage is read anew with each query",
    "at most every pair": "at most: which were read before, or how many words find, is not known",
}


@dataclass(kw_only=True)
class PlanArguments(Arguments):
    """How a plan is made."""

    calibration_seconds: float = arg(
        10.0,
        "How long the LM reads on this device to measure its speed; 0 runs no model and predicts "
        "no time.",
        least=0,
        below=math.inf,
    )
    json: str | None = arg(None, "File that gets the same as numbers, as JSON.", writes=True)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Foresee texts, tokens, operations, bytes and time of a task's second stage.

    Examples:
      pgra plan --task sst2 --lm facebook/opt-13b --encoder google-bert/bert-base-uncased
      pgra plan --task sst2 --dataset_name bundled:rotten-tomatoes --corpus bundled:wikipedia-19k \
          --encoder bundled:minilm-l6 --lm bundled:smollm2-135m --max_train_samples 32 \
          --json plan.json

    Takes the flags of pgra train but for the reader's training. Nothing is computed for keeps: only
    the corpus is read into the artifacts folder, as by every command that opens it. Numbers are
    counts where candidates or an index are there to count on; where it says "about", they are
    estimates: build the index first (pgra index) for better ones.
    """
    sections, (how,) = parse_stages(argv, [PlanArguments], prog="pgra plan", **about(main))
    args = PgraArguments(**sections)
    target = None if how.json is None else Path(how.json)
    if args.rerank.num_evidence == 0 or args.rerank.reranker == "none":
        raise ConfigError(
            "the LM has nothing to read with --num_evidence 0 or --reranker none: "
            "plan a run with --reranker prompted"
        )
    from pgra.artifacts import write_json
    from pgra.core import ALONE
    from pgra.methods.stages import Stages

    quiet_libraries()
    plan = Stages.read(args, ALONE).plan(seconds=how.calibration_seconds)
    if target is not None:
        write_json(target, {"reranker": args.rerank.reranker, **plan_numbers(plan)})
    say(describe_plan(plan, args.rerank.reranker))
    return 0


def plan_numbers(plan: "Plan") -> dict[str, Any]:
    """Return a plan for JSON: bytes, seconds and counts, unrounded."""
    from pgra.artifacts import package_versions

    first, cost, speed = dict(vars(plan.first)), plan.cost, plan.speed
    del first["rows"], first["stored"]  # as many as there are passages
    costs: dict[str, Any] | None = None
    if cost is not None:
        reading = {**vars(cost.reading), "device_bytes": cost.reading.device_bytes}
        costs = {**vars(cost), "reading": reading}
        del costs["trial"], costs["for_fit"]  # a grid's concern
    return {
        **vars(plan),
        "first": first,
        "cost": costs,
        "speed": speed and {**vars(speed), "tokens_per_second": speed.tokens_per_second},
        "seconds": {str(count): plan.seconds(count) for count in (1, *_PROCESSES)},
        "versions": package_versions(),
    }


def describe_plan(plan: "Plan", reranker: str) -> str:
    """Word a plan as a table: what, how much, and how that is known."""
    cost, title = plan.cost, f"plan of {plan.task} with --reranker {reranker}"
    if cost is not None:
        title = f"plan of {plan.task} with {cost.reading.model} on {cost.reading.device}"
    rows = list(_rows(plan, reranker))
    names = max(len(name) for name, value, _ in rows if value)
    values = max(len(value) for _, value, _ in rows)
    lines = [title]
    for name, value, note in rows:
        line = f"  {name:<{names}}  {value:>{values}}  {note}".rstrip()
        lines += [line] if value else ["", name]
    return "\n".join(lines)


Row = tuple[str, str, str]
"""What, how much, and how that is known; without a value the title of those below."""


def _rows(plan: "Plan", reranker: str) -> Iterator[Row]:
    first, cost = plan.first, plan.cost
    is_whole = first.basis == "whole corpus"
    if is_whole:
        yield "first stage: none, the LM's own states are searched", "", ""
    else:
        yield "first stage", "", ""
        yield "candidates", f"{first.num_candidates:,}", "a query"
    if first.width:
        state = "for the index" if first.num_to_encode else "the index is built"
        yield "passages to encode", f"{first.num_to_encode:,}", state
    if plan.index_bytes:
        about = ", at most about" if is_whole else ", about: vectors and a Flat index"
        yield "index", _amount(plan.index_bytes, "B"), "on disk" + about * (not first.index_bytes)
    if first.seconds is not None:
        yield "time", _time(first.seconds), "about, one process"
    if cost is None:
        yield f"second stage: what {reranker} reads is not known", "", ""
        return
    queries, k, about = sum(plan.queries.values()), first.num_candidates, "~" * (not cost.is_exact)
    texts = "pairs to read" if cost.reads_pairs else "distinct passages"
    yield "second stage: what there is to read", "", ""
    splits = ", ".join(f"{split} {count:,}" for split, count in plan.queries.items())
    yield "queries", f"{queries:,}", splits
    yield "pairs", f"{queries * k:,}", f"queries x {k:,}"
    yield texts, f"{about}{cost.passages:,}", _BASES[cost.basis]
    yield "  at most", f"{cost.most_passages:,}", "pairs, or the corpus"
    yield "distinct queries", f"{cost.queries:,}", ""
    yield "in the bank", f"{about}{cost.banked:,}", "read before"
    yield "to read", f"{about}{cost.to_read:,}", "LM forwards"
    yield "second stage: what that costs", "", ""
    reading = cost.reading
    if cost.to_read:
        yield from _reading_rows(reading, is_own=cost.reads_pairs)
    yield "bank", _amount(cost.bank_bytes, "B"), "more on disk"
    parts = [_amount(size, "B") for size in (reading.weights, reading.cache, reading.batch)]
    note = "weights {}, prefix {}, a batch about {}".format(*parts)
    yield "device memory", _amount(reading.device_bytes, "B"), note
    yield from _time_rows(plan, cost)


def _reading_rows(reading: "Reading", *, is_own: bool) -> Iterator[Row]:
    """Say what reading costs; `is_own`: each query has a prefix of its own."""
    shared, count = reading.is_shared, reading.num_prefixes
    if not shared:
        how = "read with every text"
    elif count == 1:
        how = "read once"
    elif is_own:
        how = f"about: {count:,} queries have one each, read once each"
    else:
        how = f"there are {count}, each read once; every text is read under each"
    if reading.prefix:
        yield "tokens of the prefix", f"{reading.prefix:,}", how
    cut = f", {reading.cut:.1%} cut to fit" if reading.cut else ""
    whole = "with the prefix, " if reading.prefix and not shared else ""
    text = "tokens of a text" if shared else "tokens of a prompt"
    yield text, f"{reading.own_mean:.1f}", f"{whole}of {reading.sampled:,} texts{cut}"
    sharing = "with the prefix shared" if shared else "the prefix is not shared" if whole else ""
    for name, once, anew, unit, note in (
        ("tokens", reading.tokens, reading.tokens_whole, "", sharing),
        ("operations", reading.flops, reading.flops_whole, "FLOP", _OPERATIONS),
    ):
        yield name, _amount(once, unit), note
        if shared:
            yield "  without sharing", _amount(anew, unit), f"{anew / once:.1f} x as many"


def _time_rows(plan: "Plan", cost: "Cost") -> Iterator[Row]:
    total, speed, reading = plan.seconds(), plan.speed, cost.reading
    if total is None:
        yield "time: not predicted (--calibration_seconds 0)", "", ""
    elif speed is None:
        yield "time", "", ""
        yield "one process", _time(total), "0 LM forwards"
    else:
        rate = speed.tokens_per_second
        work = _amount(rate * reading.flops / max(1, reading.tokens), "FLOP/s")
        note = f"{speed.texts:,} texts in {speed.seconds:.1f} s, {work}"
        yield "time, foreseen from the speed on this device", "", ""
        yield "calibration", f"{rate:,.0f} tokens/s", note
        note = f"of which {speed.load_seconds:.0f} s to load the LM"
        yield "one process", _time(total), note
        note = "each on a device like this one"
        for count in _PROCESSES:
            seconds = plan.seconds(count)
            if seconds is not None and cost.shards >= count:
                yield f"{count} processes", _time(seconds), note * (count == _PROCESSES[0])


def _amount(value: float, unit: str) -> str:
    """Word a count, bytes or operations in powers of a thousand."""
    index = 0
    while value >= 1000 and index < len(_POWERS) - 1:
        value, index = value / 1000, index + 1
    number = f"{value:.3g}" if index else f"{value:,.0f}"
    power = _POWERS[index].upper() if unit == "B" else _POWERS[index]
    return f"{number} {power}{unit}".rstrip()


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
