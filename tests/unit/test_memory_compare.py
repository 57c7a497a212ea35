"""Gaps between systems with a memory, worked out by hand."""

from dataclasses import replace

import pytest
from following_lm import FollowingLM

from pgra.experiments.memory import StreamResult, Variant, compare_systems, render_report
from pgra.memory.families import load_family
from pgra.memory.prompts import load_few_shot
from pgra.memory.stream import NoMemory, Simulation, make_stream, measure

FAMILY = load_family("lexical")
WORDS = {kind: {"word": ["x"]} for kind in FAMILY.answers}


@pytest.fixture(scope="module")
def taken():
    few_shot = load_few_shot("lexical")
    simulated = Simulation(
        family=FAMILY,
        few_shot=few_shot,
        completer=FollowingLM(),
        clarification_probability=1,
        seed=0,
    )
    return list(simulated.run(make_stream(FAMILY, WORDS, num_steps=4, seed=0), NoMemory(few_shot)))


def result(taken, system, outcomes, *, p=1.0, seed=0, tokens=10):
    steps = [
        replace(one, understood=bool(u), num_prompt_tokens=tokens)
        for one, u in zip(taken, outcomes, strict=True)
    ]
    told = measure(steps)
    told["wrong_type_pairs"] = []
    return StreamResult(Variant(system, p, seed), told, steps)


def test_gaps_areas_and_costs_are_those_of_the_same_seeds(taken):
    results = [
        result(taken, "no-mem", (0, 0, 1, 0), p=0.0),
        result(taken, "no-mem", (0, 0, 0, 0), p=0.0, seed=1),
        result(taken, "mem", (0, 1, 1, 1), tokens=15),
        result(taken, "mem", (0, 0, 0, 1), tokens=15, seed=1),
        result(taken, "mem", (1, 1, 1, 1), seed=2),  # the other has no such seed
    ]
    (claim,) = compare_systems(results)
    assert (claim.better.system, claim.worse.system) == ("mem", "no-mem")
    assert claim.final.mean == pytest.approx((0.5 + 0.25) / 2)
    areas = [(0 + 1 / 2 + 2 / 3 + 3 / 4) / 4 - (0 + 0 + 1 / 3 + 1 / 4) / 4, (1 / 4) / 4]
    assert claim.area.mean == pytest.approx(sum(areas) / 2)
    assert claim.cost == 1.5
    assert claim.p_value == 1.0  # two steps, then one: the halves of 0.5 and 1 say nothing


def test_many_steps_that_all_speak_for_one_are_told_by_the_test(taken):
    many = [*taken] * 5
    results = [result(many, "no-mem", [0] * 20, p=0.0), result(many, "grow", [1] * 20)]
    (claim,) = compare_systems(results)
    assert claim.p_value == pytest.approx(2 * 0.5**20)
    assert claim.final.sd is None
    (back,) = compare_systems([result(many, "no-mem", [1] * 20, p=0.0), results[1]])
    assert back.p_value == 1.0  # the control


def test_what_the_paper_compares_is_compared(taken):
    plan = [("no-mem", 0.0), ("grow", 0.5), ("grow", 1.0), ("mem", 0.5), ("mem", 1.0)]
    results = [result(taken, system, (0, 1, 1, 1), p=p) for system, p in plan]
    pairs = [
        (c.better.system, c.better.probability, c.worse.system, c.worse.probability)
        for c in compare_systems(results)
    ]
    assert pairs == [
        ("grow", 0.5, "no-mem", 0.0),
        ("grow", 1.0, "no-mem", 0.0),
        ("grow", 1.0, "grow", 0.5),
        ("mem", 0.5, "no-mem", 0.0),
        ("mem", 0.5, "grow", 0.5),
        ("mem", 1.0, "no-mem", 0.0),
        ("mem", 1.0, "grow", 1.0),
        ("mem", 1.0, "mem", 0.5),
    ]
    assert compare_systems(results[:1]) == []


def test_a_report_tells_gaps_and_what_seeds_differ_by(taken):
    results = [
        result(taken, "no-mem", (0, 0, 1, 0), p=0.0),
        result(taken, "no-mem", (0, 0, 0, 0), p=0.0, seed=1),
        result(taken, "mem", (0, 1, 1, 1), tokens=15),
        result(taken, "mem", (0, 0, 0, 1), tokens=15, seed=1),
    ]
    text = render_report(FAMILY, results, gate=None)
    assert "| MEM-PROMPT, p = 1 - NO-MEM | +0.375 ± 0.177 |" in text
    assert "| 0.12 ± 0.18 |" in text  # NO-MEM's 0.25 and 0
    assert "| understood, steps up to | 4 |" in text
    longer = render_report(FAMILY, [result([*taken] * 10, "grow", [0, 1] * 20)], gate=None)
    assert "| understood, steps up to | 25 | 40 |" in longer
    assert "| GROW-PROMPT, p = 1 | 0.48 | 0.50 |" in longer
    alone = render_report(FAMILY, results[:1], gate=None)
    assert " ± " not in alone
    assert "McNemar" not in alone
