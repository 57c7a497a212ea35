"""The simulated user's bookkeeping, with a completer that follows clarifications by a rule."""

import re
from dataclasses import replace

import pytest
from following_lm import Echo, FollowingLM, open_memory, prompted, stream

from pgra.errors import ArtifactError
from pgra.lm.cache import AnswersCache, CachedLM
from pgra.memory.families import Step, load_family
from pgra.memory.lookup import EditLookup
from pgra.memory.report import compare_systems, group_by_title
from pgra.memory.stream import (
    Experiment,
    GrowPrompt,
    MemPrompt,
    StreamResult,
    Variant,
    measure_stream,
    play,
)


def played(lm, steps, system, p=1.0):
    return list(play(lm, steps, system, probability=p, seed=0))


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_only_what_was_clarified_is_added_and_then_understood(p):
    """The paper's closest memory holds one key a phrasing: 12 can fail here, homonyms never."""
    steps, seen, ahead, alone = stream(), set(), prompted(), prompted(num_ahead=1)
    with open_memory(0.0) as memory:
        outcomes = played(ahead, steps, MemPrompt(ahead, memory), p)
        num_kept = len(memory)
    for number, (step, one) in enumerate(zip(steps, outcomes, strict=True), 1):
        frame = re.sub(r"word\d", "", step.question)
        assert one.step == number
        assert one.understood == (step.kind == "hom" or frame in seen)
        assert bool(one.neighbors) == (frame in seen)
        assert not (one.clarified and one.understood)
        seen |= {frame} if one.clarified else set()
    assert num_kept == len(seen) == (12 if p == 1.0 else len(seen))
    failed = [step.clarified for step in outcomes if not step.understood]
    assert p * 0.5 <= sum(failed) / len(failed) <= p * 1.5
    # Asking ahead changes no outcome, only the number of calls.
    with open_memory(0.0) as memory:
        assert played(alone, steps, MemPrompt(alone, memory), p) == outcomes
    assert len(ahead.completer.calls) < len(alone.completer.calls) / 2


def test_wrong_answers_are_recalled_with_the_right_one():
    family = replace(load_family("webquestions"), num_remembered=1)
    lm = prompted("webquestions", Echo(), family=family)
    asked = [("who wrote a", "X"), ("who wrote b", "X"), ("who wrote a", "X"), ("where is c", "Y")]
    steps = [Step("question", q, a, expected=(a, "Z")) for q, a in asked]
    with open_memory(None) as memory:
        system = MemPrompt(lm, memory)
        outcomes = played(lm, steps, system)
        assert [step.understood for step in outcomes] == [False, True, True, False]
        assert [step.neighbors for step in outcomes] == [[], *[["who wrote a"]] * 3]
        assert [(e.question, e.feedback) for e in memory] == [asked[0], asked[3]]
        prompt, examples = system.ask(asked[0][0]).text, lm.few_shot.examples
        assert prompt.count("END") == len(examples) == 16
        assert examples[15].question not in prompt
        assert examples[14].question in prompt


@pytest.fixture(scope="module")
def four():
    lm = prompted()
    return played(lm, stream(4), GrowPrompt(lm), p=0.0)


def test_measures_are_those_worked_out_by_hand(four):
    ways = zip(four, (True, False, True, False), ("", "f", "f", "f"), strict=True)
    made = [replace(s, kind="syn", understood=u, neighbors=list(used)) for s, u, used in ways]
    measured = measure_stream(made)
    assert (measured["understood"], measured["understood_by_type"]) == (0.5, {"syn": 0.5})
    assert (measured["lookups"], measured["effective"]) == (3, 1 / 3)
    made[0] = replace(made[0], num_prompt_tokens=None)  # of an endpoint that does not say
    assert measure_stream(made)["prompt_tokens"] is None


def experiment(folder, completer, **more):
    shared = {"lm": prompted(completer=completer), "open_lookup": EditLookup}
    return Experiment(**{"folder": folder, "threshold": -5.0, **shared, **more})


STREAMS = {0: stream(20)}


class Stopping(FollowingLM):
    """Is interrupted at its third call."""

    def complete(self, prompts, **more):
        if len(self.calls) == 2:
            raise KeyboardInterrupt
        return super().complete(prompts, **more)


def test_a_stopped_stream_goes_on_and_asks_nothing_again(tmp_path):
    plan, cache = [Variant("mem", 1.0, 0)], AnswersCache(tmp_path / "answers")
    stopping, going_on, unbroken, idle = Stopping(), FollowingLM(), FollowingLM(), FollowingLM()
    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path / "one", CachedLM(stopping, cache)).run(STREAMS, plan)
    (one,) = experiment(tmp_path / "one", CachedLM(going_on, cache)).run(STREAMS, plan)
    (other,) = experiment(tmp_path / "two", unbroken).run(STREAMS, plan)
    assert one == other
    before, then = sum(stopping.calls), sum(going_on.calls)
    assert 0 < before < before + then <= sum(unbroken.calls)
    (again,) = experiment(tmp_path / "one", idle).run(STREAMS, plan)
    assert (idle.calls, again.outcomes) == ([], one.outcomes)
    with pytest.raises(ArtifactError, match="threshold -5.0"):
        experiment(tmp_path / "one", idle, threshold=-4.0).run(STREAMS, plan)


def result(steps, system, outcomes, *, p=1.0, seed=0):
    made = [replace(step, understood=bool(u)) for step, u in zip(steps, outcomes, strict=True)]
    return StreamResult(Variant(system, p, seed), made)


def test_gaps_are_those_of_the_same_seeds(four):
    results = [
        result(four, "no-mem", (0, 0, 1, 0), p=0.0),
        result(four, "no-mem", (0, 0, 0, 0), p=0.0, seed=1),
        result(four, "mem", (0, 1, 1, 1)),
        result(four, "mem", (0, 0, 0, 1), seed=1),
        result(four, "mem", (1, 1, 1, 1), seed=2),  # the other has no such seed
    ]
    (row,) = compare_systems(group_by_title(results))
    # 3/4 - 1/4 and 1/4 - 0. Two steps, then one: the p-values 0.5 and 1 say nothing.
    assert [*row.values()] == ["MEM-PROMPT, p = 1 - NO-MEM", "+0.375 ± 0.177", "1"]
