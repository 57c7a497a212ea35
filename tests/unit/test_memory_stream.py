"""The simulated user's bookkeeping, with a completer that follows clarifications by a rule."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from following_lm import Echo, FollowingLM, open_memory, stream

from pgra.errors import ArtifactError
from pgra.lm.cache import AnswersCache, CachedLM
from pgra.memory.experiment import Experiment, StreamArguments
from pgra.memory.families import load_family, load_few_shot
from pgra.memory.lookup import EditLookup, Match
from pgra.memory.report import (
    StreamResult,
    Variant,
    choose_threshold,
    compare_methods,
    compare_with,
    correlate,
    judge_thresholds,
    measure,
    render_report,
)
from pgra.memory.stream import (
    GrowPrompt,
    MemPrompt,
    PromptedLM,
    Simulation,
    Step,
)

FAMILY, FEW_SHOT = load_family("lexical"), load_few_shot("lexical")


def simulation(completer=None, **more):
    lm = PromptedLM(few_shot=FEW_SHOT, completer=completer or FollowingLM())
    return Simulation(**{"family": FAMILY, "lm": lm, **more})


def play(simulated, steps, system, p=1.0):
    return list(simulated.play(steps, system, probability=p, seed=0))


def understood(outcomes):
    return [step.understood for step in outcomes]


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_only_what_was_clarified_is_added_and_then_understood(p):
    """The paper's closest memory holds one key a phrasing: 12 can fail here, homonyms never."""
    steps, seen, ahead, alone = stream(), set(), simulation(), simulation(num_ahead=1)
    with open_memory(0.0) as memory:
        outcomes = play(ahead, steps, MemPrompt(FAMILY, FEW_SHOT, memory), p)
        num_kept = len(memory)
    for number, (step, one) in enumerate(zip(steps, outcomes, strict=True), 1):
        frame = step.question.replace(step.word, "")
        assert one.step == number
        assert one.understood == (step.kind == "hom" or frame in seen)
        assert one.used_memory == (frame in seen)
        assert not (one.clarified and one.understood)
        seen |= {frame} if one.clarified else set()
    assert num_kept == len(seen) == (12 if p == 1.0 else len(seen))
    failed = [step.clarified for step in outcomes if not step.understood]
    assert p * 0.5 <= sum(failed) / len(failed) <= p * 1.5
    # Asking ahead changes no outcome, only the number of calls.
    with open_memory(0.0) as memory:
        assert play(alone, steps, MemPrompt(FAMILY, FEW_SHOT, memory), p) == outcomes
    assert len(ahead.lm.completer.calls) < len(alone.lm.completer.calls) / 2


def test_the_threshold_with_the_largest_f1_is_chosen_of_equals_the_strictest():
    kinds = ["a", "a", "b", "a", "a", "b"]
    found = {"2": (1, 0.9), "3": (1, 0.6), "4": (1, 0.8), "5": (3, 0.7), "6": (3, 0.5)}
    steps = [Step(str(i), kind, str(i), "f") for i, kind in enumerate(kinds, 1)]

    def open_lookup(log):
        def find(question, k):
            entry, score = found.get(question, (0, 0.0))
            return [Match(**vars(entry), score=score) for entry in log.get([entry])]

        return SimpleNamespace(find=find)

    # Four questions follow one of their meaning; 3 and 5 get the feedback of another.
    reports = judge_thresholds(steps, open_lookup)
    assert [report.threshold for report in reports] == [0.9, 0.8, 0.7, 0.6, 0.5]
    some = reports[2]
    assert (some.precision, some.recall) == (2 / 3, 2 / 4)
    best = choose_threshold(steps, open_lookup)
    assert (best.threshold, best.f1) == (0.8, 4 / 6)  # as of 0.5


def test_wrong_answers_are_recalled_with_the_right_one_and_prompts_keep_their_length():
    few_shot = load_few_shot("webquestions")
    family = replace(load_family("webquestions"), num_remembered=1)
    asked = [("who wrote a", "X"), ("who wrote b", "X"), ("who wrote a", "X"), ("where is c", "Y")]
    steps = [Step(str(i), "question", q, a, expected=(a, "Z")) for i, (q, a) in enumerate(asked)]
    with open_memory(None) as memory:
        system = MemPrompt(family, few_shot, memory)
        lm = PromptedLM(few_shot=few_shot, completer=Echo())
        outcomes = play(simulation(family=family, lm=lm), steps, system)
        assert understood(outcomes) == [False, True, True, False]  # the first taught the second
        assert [step.neighbors for step in outcomes] == [[], *[["who wrote a"]] * 3]
        assert [(e.question, e.feedback) for e in memory] == [asked[0], asked[3]]
        prompt = system.ask(steps[0]).text
        assert prompt.count("END") == len(few_shot.examples) == 16
        assert few_shot.examples[15].question not in prompt
        assert few_shot.examples[14].question in prompt
        assert not any(step.is_wrong_kind for step in outcomes)
        memory.threshold = -1.0  # as with --threshold
        used = [
            system.ask(replace(steps[0], question=q)).num_used
            for q in ("who wrote a", "who wrote?")
        ]
        assert used == [1, 0]


@pytest.fixture(scope="module")
def four():
    return play(simulation(), stream(4), GrowPrompt(simulation().lm, max_added=0))


def test_measures_are_those_worked_out_by_hand(four):
    made = [
        replace(step, kind="syn", matched_kind="syn", understood=u, feedback=f, neighbors=[f])
        for step, u, f in zip(four, (True, False, True, False), ("", "f", "f", "f"), strict=True)
    ]
    made[3] = replace(made[3], matched_kind="ant")
    measured = measure(made)
    assert measured["understood"] == 0.5
    assert measured["understood_area"] == pytest.approx((1 + 1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert measured["understood_by_type"] == {"syn": 0.5}
    assert measured["lookups"] == {"used": 3, "effective": 1 / 3, "wrong_type": 1 / 3}
    before = (True, True, False, False)
    bare = [replace(step, understood=u) for step, u in zip(made, before, strict=True)]
    shares = {"helped": 1 / 3, "hurt": 1 / 3, "no_change": 1 / 3}
    assert compare_with(made, bare) == pytest.approx(shares)
    assert compare_with(made[:1], bare[:1])["helped"] is None
    assert correlate([True, True, False, False], [True, False, True, False]) == 0.0


def experiment(folder, completer, **more):
    shared = {"family": FAMILY, "lm": simulation(completer).lm, "open_lookup": EditLookup}
    return Experiment(**{"folder": folder, "threshold": -5.0, **shared, **more})


STREAMS = {0: stream(20)}


def test_a_plan_runs_what_others_are_compared_with_first():
    def names(systems, seeds, **more):
        more |= {"systems": systems, "clarification_probabilities": [0.5, 1.0], "seeds": seeds}
        return [variant.name for variant in StreamArguments(stream="x", **more).plan()]

    each = ["no-mem", "grow-p0.5", "grow-p1", "mem-p0.5", "mem-p1"]
    planned = names(["mem", "no-mem", "grow"], [0, 1])
    assert planned == [f"{name}-seed{seed}" for seed in (0, 1) for name in each]


class Stopping(FollowingLM):
    """Is interrupted at a call."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def complete(self, prompts, **more):
        if len(self.calls) == self.at:
            raise KeyboardInterrupt
        return super().complete(prompts, **more)


def test_a_stopped_stream_goes_on_asks_nothing_again_and_is_no_other(tmp_path):
    plan, cache = [Variant("mem", 1.0, 0)], AnswersCache(tmp_path / "answers")
    stopping, going_on, unbroken, idle = Stopping(2), FollowingLM(), FollowingLM(), FollowingLM()
    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path / "one", CachedLM(stopping, cache)).run(STREAMS, plan)
    (one,) = experiment(tmp_path / "one", CachedLM(going_on, cache)).run(STREAMS, plan)
    (other,) = experiment(tmp_path / "two", unbroken).run(STREAMS, plan)
    assert (one.outcomes, one.metrics) == (other.outcomes, other.metrics)
    before, then = sum(stopping.calls), sum(going_on.calls)
    assert 0 < before < before + then <= sum(unbroken.calls)
    (again,) = experiment(tmp_path / "one", idle).run(STREAMS, plan)
    assert (idle.calls, again.outcomes) == ([], one.outcomes)
    with pytest.raises(ArtifactError, match="was made with threshold -5.0, this run asks for -4"):
        experiment(tmp_path / "one", idle, threshold=-4.0).run(STREAMS, plan)
    (tmp_path / "one" / "mem-p1-seed0" / "steps.jsonl").write_text("{")
    with pytest.raises(ArtifactError, match="steps.jsonl is damaged"):
        experiment(tmp_path / "one", idle).run(STREAMS, plan)


def result(steps, system, outcomes, *, p=1.0, seed=0, tokens=10):
    steps = [
        replace(step, understood=bool(u), num_prompt_tokens=tokens)
        for step, u in zip(steps, outcomes, strict=True)
    ]
    return StreamResult(Variant(system, p, seed), measure(steps), steps)


def test_gaps_areas_and_costs_are_those_of_the_same_seeds(four):
    results = [
        result(four, "no-mem", (0, 0, 1, 0), p=0.0),
        result(four, "no-mem", (0, 0, 0, 0), p=0.0, seed=1),
        result(four, "mem", (0, 1, 1, 1), tokens=15),
        result(four, "mem", (0, 0, 0, 1), tokens=15, seed=1),
        result(four, "mem", (1, 1, 1, 1), seed=2),  # the other has no such seed
    ]
    (row,) = compare_methods(results)
    # 3/4 - 1/4 and 1/4 - 0; (0 + 1/2 + 2/3 + 3/4 - 1/3 - 1/4) / 4 and (1/4) / 4.
    # Two steps, then one: the p-values 0.5 and 1 say nothing.
    gaps = ["+0.375 ± 0.177", "+0.198 ± 0.192", "1", "1.50"]
    assert row == ["MEM-PROMPT, p = 1 - NO-MEM", *gaps]
    text = " ".join(render_report(FAMILY, results[:4], gate=None).split())
    assert f"| {row[0]} | {gaps[0]} |" in text
    assert "| 0.12 ± 0.18 |" in text  # NO-MEM's 0.25 and 0
    assert " ± " not in render_report(FAMILY, results[:1], gate=None)
