"""Foresees what a task's second stage will cost, before it is run: `pgra plan`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import SECTIONS, quiet_libraries, say
from pgra.config import PgraArguments, parse_arguments
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.core import Json
    from pgra.plan import Plan

EXAMPLE = """examples:
  pgra plan --task sst2 --lm facebook/opt-13b --encoder google-bert/bert-base-uncased
  pgra plan --task sst2 --dataset_name bundled:rotten-tomatoes --corpus bundled:wikipedia-19k \\
      --encoder bundled:minilm-l6 --lm bundled:smollm2-135m --max_train_samples 32 --json plan.json

Takes the flags of train.py but for the reader's training. Nothing is computed for keeps: only the
corpus is read into the artefacts folder, as by every command that opens it. Numbers are counts
where candidates or an index are there to count on; where it says "about", they are estimates:
build the index first (pgra index) for better ones.
"""
_PROCESSES = (2, 4, 8)
_PAIRS = ("every pair", "at most every pair")  # no passage is read once for several queries
_BASES = {
    "stored": "counted: the candidates are stored",
    "searched": "counted: the first stage was searched in memory",
    "sampled": "about: grown from a part of the queries",
    "trial": "about: from a small index of drawn passages",
    "guessed": "about, and rather fewer: as if candidates were drawn at random",
    "whole corpus": "counted: the LM reads the whole corpus",
    "every pair": "counted: read anew under each query's own prefix",
    "at most every pair": "at most: which were read before, or how many words find, is not known",
}


@dataclass(kw_only=True)
class PlanArguments:
    """How a plan is made."""

    calibration_seconds: float = field(
        default=10.0,
        metadata={
            "help": "How long the LM reads on this device to measure its speed; 0 runs no model "
            "and predicts no time."
        },
    )
    json: str | None = field(
        default=None, metadata={"help": "File that gets the same as numbers, as JSON."}
    )

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        if not 0 <= self.calibration_seconds < math.inf:
            raise ConfigError(
                f"calibration_seconds is {self.calibration_seconds}: it must be 0 (no calibration) "
                "or a number of seconds"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Foresee a run, and show it."""
    how, *sections = parse_arguments(
        [PlanArguments, *SECTIONS.values()],
        argv,
        prog="pgra plan",
        description="Foresee texts, tokens, operations, bytes and time of a task's second stage.",
        epilog=EXAMPLE,
    )
    args = PgraArguments(**dict(zip(SECTIONS, sections, strict=True)))
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
    """Give a plan as JSON: bytes, seconds and counts, unrounded."""
    from dataclasses import asdict

    from pgra.artifacts import package_versions

    numbers = asdict(plan)
    if plan.first is not None:
        del numbers["first"]["rows"]  # as many as there are passages
    numbers["sizes"]["device"] = plan.sizes.device
    numbers["texts"]["is_exact"] = plan.texts.is_exact
    numbers["seconds"] = {str(count): plan.seconds(count) for count in (1, *_PROCESSES)}
    if plan.speed is not None:
        numbers["speed"]["tokens_per_second"] = plan.speed.tokens_per_second
    return {**numbers, "versions": package_versions()}


def describe_plan(plan: "Plan") -> str:
    """Word a plan as a table: what, how much, and how that is known."""
    rows = [*_first_rows(plan), *_text_rows(plan), *_cost_rows(plan), *_time_rows(plan)]
    names = max(len(name) for name, value, _ in rows if value)
    values = max(len(value) for _, value, _ in rows)
    lines = [f"plan of {plan.task} with {plan.lm} on {plan.device}"]
    for name, value, note in rows:
        line = f"  {name:<{names}}  {value:>{values}}  {note}".rstrip()
        lines += [line] if value else ["", name]
    return "\n".join(lines)


Line = tuple[str, str, str]


def _first_rows(plan: "Plan") -> list[Line]:
    if plan.first is None:
        rows = [("first stage: none, the LM's own states are searched", "", "")]
        if plan.sizes.index:
            rows.append(("index of states", _bytes(plan.sizes.index), "on disk, at most about"))
        return rows
    first = plan.first
    rows = [("first stage", "", "")]
    if first.width:
        state = "the index is built" if not first.num_to_encode else "for the index"
        rows.append(("passages to encode", f"{first.num_to_encode:,}", state))
    if plan.sizes.index:
        note = "on disk" if first.index_bytes else "on disk, about: vectors and a Flat index"
        rows.append(("index", _bytes(plan.sizes.index), note))
    if first.seconds is not None:
        rows.append(("time", _time(first.seconds), "about, one process"))
    return rows


def _text_rows(plan: "Plan") -> list[Line]:
    texts = plan.texts
    about = "" if texts.is_exact else "~"
    by_split = ", ".join(f"{split} {count:,}" for split, count in texts.queries.items())
    return [
        ("second stage: what there is to read", "", ""),
        ("queries", f"{sum(texts.queries.values()):,}", by_split),
        ("pairs", f"{texts.pairs:,}", f"queries x {texts.num_candidates:,}"),
        (
            "passages to read" if texts.basis in _PAIRS else "distinct passages",
            f"{about}{texts.distinct_passages:,}",
            _BASES[texts.basis],
        ),
        ("  at most", f"{texts.most_passages:,}", "pairs, or the corpus"),
        ("distinct queries", f"{texts.distinct_queries:,}", ""),
        ("in the bank", f"{about}{texts.banked:,}", "passages and queries read before"),
        ("to read", f"{about}{texts.to_read:,}", "LM forwards"),
    ]


def _cost_rows(plan: "Plan") -> list[Line]:
    rows = [("second stage: what that costs", "", "")]
    if plan.texts.to_read:
        rows += _reading_rows(plan)
    sizes = plan.sizes
    parts = (
        f"weights {_bytes(sizes.weights)}, prefix {_bytes(sizes.prefix)}, "
        f"a batch about {_bytes(sizes.batch)}"
    )
    return [
        *rows,
        ("bank", _bytes(sizes.bank), "more on disk"),
        ("device memory", _bytes(sizes.device), parts),
    ]


def _reading_rows(plan: "Plan") -> list[Line]:
    reading = plan.reading
    cut = f", {reading.cut:.1%} cut to fit" if reading.cut else ""
    if not reading.is_shared:
        of_texts = f"with the prefix, of {reading.sampled:,} texts{cut}"
        return [
            ("tokens of the prefix", f"{reading.prefix:,}", "read with every text"),
            ("tokens of a prompt", f"{reading.own_mean:.1f}", of_texts),
            ("tokens", _count(reading.tokens), "the prefix is not shared"),
            ("operations", _flops(reading.flops), "2 x weights for a token, and attention"),
        ]
    more_tokens = f"{reading.tokens_whole / reading.tokens:.1f} x as many"
    more_flops = f"{reading.flops_whole / reading.flops:.1f} x as many"
    return [
        ("tokens of the prefix", f"{reading.prefix:,}", _how_often(plan)),
        ("tokens of a text", f"{reading.own_mean:.1f}", f"of {reading.sampled:,} texts{cut}"),
        ("tokens", _count(reading.tokens), "with the prefix shared"),
        ("  without sharing", _count(reading.tokens_whole), more_tokens),
        ("operations", _flops(reading.flops), "2 x weights for a token, and attention"),
        ("  without sharing", _flops(reading.flops_whole), more_flops),
    ]


def _how_often(plan: "Plan") -> str:
    num_prefixes = plan.reading.num_prefixes
    if num_prefixes == 1:
        return "read once"
    if not plan.has_own_prefixes:
        return f"there are {num_prefixes}, each read once; every text is read under each"
    return f"about: {num_prefixes:,} queries have one each, read once each"


def _time_rows(plan: "Plan") -> list[Line]:
    total = plan.seconds()
    if total is None:
        return [("time: not predicted (--calibration_seconds 0)", "", "")]
    if plan.speed is None:
        return [("time", "", ""), ("one process", _time(total), "0 LM forwards")]
    speed, reading = plan.speed, plan.reading
    rate = speed.tokens_per_second
    rows = [
        ("time, foreseen from the speed on this device", "", ""),
        (
            "calibration",
            f"{rate:,.0f} tokens/s",
            f"{speed.texts:,} texts in {speed.seconds:.1f} s, "
            f"{_flops(rate * reading.flops / max(1, reading.tokens))}/s",
        ),
        ("one process", _time(total), f"of which {speed.load_seconds:.0f} s to load the LM"),
    ]
    for count in _PROCESSES:
        seconds = plan.seconds(count)
        if seconds is not None and plan.shards >= count:
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
    place = 0
    while value >= step and place < len(units) - 1:
        value, place = value / step, place + 1
    return f"{value:.3g}{units[place]}" if place else f"{value:,.0f}{units[0]}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
