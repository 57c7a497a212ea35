"""Foresees what a task's second stage will cost, before it is run: `pgra plan`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import parse_stages, quiet_libraries, say
from pgra.config import Arguments, PgraArguments, arg
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.core import Json
    from pgra.plan import Plan
    from pgra.rerank.base import Cost

EXAMPLE = """examples:
  pgra plan --task sst2 --lm facebook/opt-13b --encoder google-bert/bert-base-uncased
  pgra plan --task sst2 --dataset_name bundled:rotten-tomatoes --corpus bundled:wikipedia-19k \\
      --encoder bundled:minilm-l6 --lm bundled:smollm2-135m --max_train_samples 32 --json plan.json

Takes the flags of train.py but for the reader's training. Nothing is computed for keeps: only the
corpus is read into the artifacts folder, as by every command that opens it. Numbers are counts
where candidates or an index are there to count on; where it says "about", they are estimates:
build the index first (pgra index) for better ones.
"""
_PROCESSES = (2, 4, 8)
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
    json: str | None = arg(None, "File that gets the same as numbers, as JSON.")


def main(argv: Sequence[str] | None = None) -> int:
    """Foresee a run, and show it."""
    sections, (how,) = parse_stages(
        argv,
        [PlanArguments],
        prog="pgra plan",
        description="Foresee texts, tokens, operations, bytes and time of a task's second stage.",
        epilog=EXAMPLE,
    )
    args = PgraArguments(**sections)
    target = None if how.json is None else Path(how.json)
    if target is not None and target.is_dir():
        raise ConfigError(f"--json {target} is a folder: name a file in it")
    from pgra.artifacts import write_json
    from pgra.plan import make_plan

    quiet_libraries()
    plan = make_plan(args, seconds=how.calibration_seconds)
    if target is not None:
        write_json(target, plan_numbers(plan))
    say(describe_plan(plan))
    return 0


def plan_numbers(plan: "Plan") -> "Json":
    """Return a plan as JSON: bytes, seconds and counts, unrounded."""
    from dataclasses import asdict

    from pgra.artifacts import package_versions

    cost = plan.cost and asdict(replace(plan.cost, trial=None))  # type: ignore[arg-type]
    numbers = asdict(replace(plan, cost=None))
    del numbers["first"]["rows"], numbers["first"]["stored"]  # as many as there are passages
    if plan.cost is not None and cost:
        del cost["trial"]
        cost["reading"]["device_bytes"] = plan.cost.reading.device_bytes
    if plan.speed is not None:
        numbers["speed"]["tokens_per_second"] = plan.speed.tokens_per_second
    numbers["seconds"] = {str(count): plan.seconds(count) for count in (1, *_PROCESSES)}
    return {**numbers, "cost": cost, "versions": package_versions()}


Line = tuple[str, str, str]


def describe_plan(plan: "Plan") -> str:
    """Word a plan as a table: what, how much, and how that is known."""
    cost, rows = plan.cost, _first_rows(plan)
    title = f"plan of {plan.task} with --reranker {plan.reranker}"
    if cost is None:
        rows.append((f"second stage: what {plan.reranker} reads is not known", "", ""))
    else:
        title = f"plan of {plan.task} with {cost.reading.model} on {cost.reading.device}"
        rows += [*_text_rows(plan, cost), *_cost_rows(cost), *_time_rows(plan, cost)]
    names = max(len(name) for name, value, _ in rows if value)
    values = max(len(value) for _, value, _ in rows)
    lines = [title]
    for name, value, note in rows:
        line = f"  {name:<{names}}  {value:>{values}}  {note}".rstrip()
        lines += [line] if value else ["", name]
    return "\n".join(lines)


def _first_rows(plan: "Plan") -> list[Line]:
    first = plan.first
    if first.basis == "whole corpus":
        rows = [("first stage: none, the LM's own states are searched", "", "")]
        if plan.index_bytes:
            rows.append(("index of states", _bytes(plan.index_bytes), "on disk, at most about"))
        return rows
    rows = [("first stage", "", ""), ("candidates", f"{first.num_candidates:,}", "a query")]
    if first.width:
        state = "the index is built" if not first.num_to_encode else "for the index"
        rows.append(("passages to encode", f"{first.num_to_encode:,}", state))
    if plan.index_bytes:
        note = "on disk" if first.index_bytes else "on disk, about: vectors and a Flat index"
        rows.append(("index", _bytes(plan.index_bytes), note))
    if first.seconds is not None:
        rows.append(("time", _time(first.seconds), "about, one process"))
    return rows


def _text_rows(plan: "Plan", cost: "Cost") -> list[Line]:
    queries, k = sum(plan.queries.values()), plan.first.num_candidates
    about = "" if cost.is_exact else "~"
    return [
        ("second stage: what there is to read", "", ""),
        (
            "queries",
            f"{queries:,}",
            ", ".join(f"{split} {count:,}" for split, count in plan.queries.items()),
        ),
        ("pairs", f"{queries * k:,}", f"queries x {k:,}"),
        (
            "pairs to read" if cost.reads_pairs else "distinct passages",
            f"{about}{cost.passages:,}",
            _BASES[cost.basis],
        ),
        ("  at most", f"{cost.most_passages:,}", "pairs, or the corpus"),
        ("distinct queries", f"{cost.queries:,}", ""),
        ("in the bank", f"{about}{cost.banked:,}", "read before"),
        ("to read", f"{about}{cost.to_read:,}", "LM forwards"),
    ]


def _cost_rows(cost: "Cost") -> list[Line]:
    reading, rows = cost.reading, [("second stage: what that costs", "", "")]
    cut = f", {reading.cut:.1%} cut to fit" if reading.cut else ""
    sampled = f"of {reading.sampled:,} texts{cut}"
    if not cost.to_read:
        pass
    elif reading.is_shared:
        more_tokens = reading.tokens_whole / reading.tokens
        more_flops = reading.flops_whole / reading.flops
        how = f"about: {reading.num_prefixes:,} queries have one each, read once each"
        if reading.num_prefixes == 1:
            how = "read once"
        elif not cost.reads_pairs:
            how = f"there are {reading.num_prefixes}, each read once; every text is read under each"
        rows += [
            ("tokens of the prefix", f"{reading.prefix:,}", how),
            ("tokens of a text", f"{reading.own_mean:.1f}", sampled),
            ("tokens", _count(reading.tokens), "with the prefix shared"),
            ("  without sharing", _count(reading.tokens_whole), f"{more_tokens:.1f} x as many"),
            ("operations", _flops(reading.flops), _OPERATIONS),
            ("  without sharing", _flops(reading.flops_whole), f"{more_flops:.1f} x as many"),
        ]
    else:
        if reading.prefix:
            rows.append(("tokens of the prefix", f"{reading.prefix:,}", "read with every text"))
            sampled = f"with the prefix, {sampled}"
        rows += [
            ("tokens of a prompt", f"{reading.own_mean:.1f}", sampled),
            ("tokens", _count(reading.tokens), "the prefix is not shared" * bool(reading.prefix)),
            ("operations", _flops(reading.flops), _OPERATIONS),
        ]
    parts = (
        f"weights {_bytes(reading.weights)}, prefix {_bytes(reading.cache)}, "
        f"a batch about {_bytes(reading.batch)}"
    )
    return [
        *rows,
        ("bank", _bytes(cost.bank_bytes), "more on disk"),
        ("device memory", _bytes(reading.device_bytes), parts),
    ]


def _time_rows(plan: "Plan", cost: "Cost") -> list[Line]:
    total, speed, reading = plan.seconds(), plan.speed, cost.reading
    if total is None:
        return [("time: not predicted (--calibration_seconds 0)", "", "")]
    if speed is None:
        return [("time", "", ""), ("one process", _time(total), "0 LM forwards")]
    rate = speed.tokens_per_second
    work = f"{_flops(rate * reading.flops / max(1, reading.tokens))}/s"
    rows = [
        ("time, foreseen from the speed on this device", "", ""),
        (
            "calibration",
            f"{rate:,.0f} tokens/s",
            f"{speed.texts:,} texts in {speed.seconds:.1f} s, {work}",
        ),
        ("one process", _time(total), f"of which {speed.load_seconds:.0f} s to load the LM"),
    ]
    for count in _PROCESSES:
        seconds = plan.seconds(count)
        if seconds is not None and cost.shards >= count:
            note = "each on a device like this one" if count == _PROCESSES[0] else ""
            rows.append((f"{count} processes", _time(seconds), note))
    return rows


def _count(value: float) -> str:
    return _scaled(value, ["", " k", " M", " G", " T"], 1000)


def _flops(value: float) -> str:
    units = ["", "k", "M", "G", "T", "P", "E"]
    return _scaled(value, [f" {unit}FLOP" for unit in units], 1000)


def _bytes(value: float) -> str:
    return _scaled(value, [" B", " KB", " MB", " GB", " TB"], 1000)


def _scaled(value: float, units: Sequence[str], step: int) -> str:
    index = 0
    while value >= step and index < len(units) - 1:
        value, index = value / step, index + 1
    return f"{value:.3g}{units[index]}" if index else f"{value:,.0f}{units[0]}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
