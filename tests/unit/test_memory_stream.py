"""The simulated user's bookkeeping, with a completer that follows clarifications by a rule."""

import json
from dataclasses import replace

import pytest
from following_lm import FollowingLM

from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.experiments.memory import (
    Experiment,
    Variant,
    choose_gate,
    plan_variants,
    render_report,
    run_streams,
)
from pgra.lm.base import Completion
from pgra.lm.cache import AnswersCache, CachedLM
from pgra.memory.families import load_family
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import EditLookup
from pgra.memory.prompts import GrowingPrompt, load_few_shot
from pgra.memory.stream import (
    Growing,
    NoMemory,
    RecallingErrors,
    Remembering,
    Simulation,
    Step,
    compare_with,
    make_stream,
    measure,
    running_accuracy,
    wrong_type_pairs,
)

FAMILY, FEW_SHOT = load_family("lexical"), load_few_shot("lexical")
WORDS = {kind: {f"word{i}": ["x"] for i in range(5)} for kind in FAMILY.answers}


def stream(count=60, *, family=FAMILY, seed=0):
    return make_stream(family, WORDS, num_steps=count, seed=seed)


def simulation(p=1.0, **more):
    values = {"family": FAMILY, "few_shot": FEW_SHOT, "completer": FollowingLM(), "seed": 0}
    return Simulation(**values, clarification_probability=p, **more)


@pytest.fixture
def log(tmp_path):
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        yield log


def remembering(log, *, threshold=-5.0):
    return Remembering(FEW_SHOT, log, EditLookup(log), threshold)


def understood(taken):
    return [one.understood for one in taken]


def test_without_a_memory_nothing_is_learned_and_prompts_go_in_batches():
    steps, simulated = stream(), simulation()
    taken = list(simulated.run(steps, NoMemory(FEW_SHOT)))
    assert understood(taken) == [step.kind == "hom" for step in steps]
    assert len(simulated.completer.calls) == 4  # of 16 questions each at most
    assert [one.step for one in taken] == list(range(1, 61))
    assert not any(one.used_memory for one in taken)
    assert all(one.answered == (one.kind == "hom") for one in taken)


def test_only_what_was_misunderstood_is_written_and_then_is_understood(log):
    steps = stream()
    taken = list(simulation().run(steps, remembering(log, threshold=0.0)))
    seen = set()
    for step, one in zip(steps, taken, strict=True):
        frame = step.question.replace(step.word, "")
        assert one.understood == (step.kind == "hom" or frame in seen)
        assert one.clarified == (not one.understood)
        assert one.used_memory == (frame in seen)
        if one.clarified:
            seen.add(frame)
    assert len(log) == sum(one.clarified for one in taken) == len(seen) == 12
    assert {event.source for event in log.events()} == {"stream"}


def test_keys_saturate_at_the_number_of_phrasings_that_fail(log):
    """The paper's closest memory holds one key a phrasing: 12 fail here, homonyms never."""
    for _ in simulation().run(stream(300), remembering(log, threshold=0.0)):
        pass
    assert len(log) == 12


def test_like_is_taken_for_unlike_until_its_own_key_is_there(log):
    """Distance 2: the release's gate of less than 6 lets it pass; the collision is told."""
    ways = {way.id: way for way in FAMILY.phrasings}
    family = replace(FAMILY, phrasings=[ways["syn0"], ways["ant0"]])
    steps = stream(20, family=family)
    taken = list(simulation().run(steps, remembering(log)))
    wrong = [one for one in taken if one.is_wrong_kind]
    assert len(wrong) == 1  # then both keys are there, each nearer to itself
    assert wrong[0].score == -2.0
    assert not wrong[0].understood
    (pair,) = wrong_type_pairs(taken)
    assert (pair["times"], pair["understood"]) == (1, 0)
    assert {pair["asked"], pair["found"]} == {"syn", "ant"}
    assert wrong_type_pairs([one for one in taken if not one.is_wrong_kind]) == []


def test_asking_ahead_changes_nothing_but_the_number_of_calls(log, tmp_path):
    steps, ahead, alone = stream(), simulation(), simulation(num_ahead=1)
    one = list(ahead.run(steps, remembering(log)))
    with FeedbackLog.open(tmp_path / "other.sqlite") as other:
        assert list(alone.run(steps, remembering(other))) == one
        assert [e.key for e in other.events()] == [e.key for e in log.events()]
    assert len(ahead.completer.calls) < len(alone.completer.calls) / 2
    assert max(alone.completer.calls) == 1
    changed = replace(one[0], understood=not one[0].understood)  # the control
    assert [changed, *one[1:]] != one


def test_a_patient_user_and_one_who_says_half_of_it(log, tmp_path):
    steps = stream(200)
    half = list(simulation(0.5).run(steps, remembering(log)))
    again_log = FeedbackLog.open(tmp_path / "again.sqlite")
    again = list(simulation(0.5).run(steps, remembering(again_log)))
    again_log.close()
    assert understood(again) == understood(half)
    whole_log = FeedbackLog.open(tmp_path / "whole.sqlite")
    whole = list(simulation(1.0).run(steps, remembering(whole_log)))
    whole_log.close()
    failed = [one for one in half if not one.understood]
    assert 0 < sum(one.clarified for one in failed) < len(failed)
    assert all(one.clarified != one.understood for one in whole)
    assert sum(understood(whole)) > sum(understood(half))


class Echo(FollowingLM):
    """Answers as the nearest example does, which is the last."""

    def _go_on(self, prompt):
        answer = prompt.split("\n\n###\n\n")[-3].removesuffix(" END")
        return Completion(f"{answer} END", len(prompt.split()), 1)


def test_wrong_answers_are_recalled_with_the_right_one_and_prompts_keep_their_length(log):
    family, few_shot = load_family("webquestions"), load_few_shot("webquestions")
    asked = [("who wrote a", "X"), ("who wrote b", "X"), ("who wrote a", "X"), ("where is c", "Y")]
    steps = [Step(str(i), "question", "", q, a, (a, "Z")) for i, (q, a) in enumerate(asked)]
    system = RecallingErrors(few_shot, log, EditLookup(log), num_remembered=1)
    simulated = replace(simulation(), family=family, few_shot=few_shot, completer=Echo())
    taken = list(simulated.run(steps, system))
    assert understood(taken) == [False, True, True, False]  # the first taught the second
    assert [one.matched_key for one in taken] == ["", *["who wrote a"] * 3]
    assert {entry.key: entry.feedback for entry in log.entries()} == {
        "who wrote a": "X",
        "where is c": "Y",
    }
    prompt = system.ask(steps[0]).prompt
    assert prompt.count("END") == len(few_shot.examples) == 16
    assert few_shot.examples[15].question not in prompt
    assert few_shot.examples[14].question in prompt
    assert not any(one.is_wrong_kind for one in taken)


def growing(completer, room=100_000):
    return Growing(GrowingPrompt(FEW_SHOT, completer.count_tokens, max_prompt_tokens=room))


def test_a_growing_prompt_costs_more_with_every_correction():
    completer = FollowingLM(copies=True, window=100_000)
    simulated = simulation(max_prompt_tokens=100_000)
    simulated = replace(simulated, completer=completer)
    taken = list(simulated.run(stream(), growing(completer)))
    sizes = [one.num_prompt_tokens for one in taken]
    added = [one.num_prompt_tokens > sizes[0] + 5 for one in taken]
    assert added.index(True) == 1 + [one.clarified for one in taken].index(True)
    assert sizes[-1] > 2 * sizes[0] > 0
    assert all(one.used_memory is False for one in taken)
    bare = list(simulation().run(stream(), NoMemory(FEW_SHOT)))
    assert sum(understood(taken)) > sum(understood(bare))


def test_a_question_beyond_the_window_is_refused():
    small = replace(simulation(), completer=FollowingLM(window=100))
    with pytest.raises(DataError, match="makes a prompt of .* tokens, and 36 fit beside"):
        list(small.run(stream(1), NoMemory(FEW_SHOT)))


def test_measures_are_those_worked_out_by_hand(log):
    assert running_accuracy([True, False, True, True]) == [1.0, 0.5, 2 / 3, 0.75]
    taken = list(simulation().run(stream(4), NoMemory(FEW_SHOT)))
    made = [
        replace(one, kind="syn", matched_kind="syn", understood=u, feedback=f, matched_key=f)
        for one, u, f in zip(taken, (True, False, True, False), ("", "f", "f", "f"), strict=True)
    ]
    made[3] = replace(made[3], matched_kind="ant")
    told = measure(made)
    assert told["understood"] == 0.5
    assert told["understood_area"] == pytest.approx((1 + 1 / 2 + 2 / 3 + 1 / 2) / 4)
    assert told["understood_by_type"] == {"syn": 0.5}
    assert told["lookups"] == {"used": 3, "effective": 1 / 3, "wrong_type": 1 / 3}
    bare = [
        replace(one, understood=u) for one, u in zip(made, (True, True, False, False), strict=True)
    ]
    assert compare_with(made, bare) == pytest.approx(
        {"helped": 1 / 3, "hurt": 1 / 3, "no_change": 1 / 3}
    )
    assert compare_with(made[:1], bare[:1])["helped"] is None
    with pytest.raises(ValueError, match="ask different questions"):
        compare_with(made[:1], [replace(made[0], question="another")])


def experiment(folder, completer, **more):
    values = {
        "folder": folder,
        "family": FAMILY,
        "few_shot": FEW_SHOT,
        "completer": completer,
        "open_lookup": EditLookup,
        "threshold": -5.0,
        "max_new_tokens": 64,
        "max_prompt_tokens": 2048,
    }
    return Experiment(**{**values, **more})


PLAN = plan_variants(["mem", "no-mem", "grow"], [0.5, 1.0], [0, 1])
STREAMS = {0: stream(30), 1: stream(30, seed=1)}


def test_a_plan_runs_what_others_are_compared_with_first():
    names = [variant.name for variant in PLAN]
    assert names[:5] == [
        *("no-mem-seed0", "grow-p0.5-seed0", "grow-p1-seed0", "mem-p0.5-seed0", "mem-p1-seed0")
    ]
    assert len(names) == 10
    dear = plan_variants(["mem", "grow"], [0.5, 1.0], [3], grow_probabilities=[0.5])
    assert [one.name for one in dear] == ["grow-p0.5-seed3", "mem-p0.5-seed3", "mem-p1-seed3"]
    with pytest.raises(ConfigError, match="names 'memory': known are no-mem, grow, mem"):
        plan_variants(["memory"], [1.0], [0])
    with pytest.raises(ConfigError, match="has 0: each is above 0 and at most 1"):
        plan_variants(["mem"], [0.0], [0])


def test_runs_stand_beside_each_other_with_the_papers_numbers(tmp_path):
    results = run_streams(experiment(tmp_path / "run", FollowingLM(copies=True)), STREAMS, PLAN)
    text = render_report(FAMILY, results, gate=None)
    assert "| NO-MEM (2 seeds) |" in text
    assert "| MEM-PROMPT, p = 1 (2 seeds) |" in text
    assert "| MEM-PROMPT, paper (GPT-3) | 0.99 | 0.98 | 0.98 | 0.96 | 0.98 | 0.98 |" in text
    told = json.loads((tmp_path / "run" / "mem-p1-seed0" / "metrics.json").read_text())
    assert told["against_no_mem"]["helped"] > 0.5
    assert (
        told["understood"]
        > json.loads((tmp_path / "run" / "no-mem-seed0" / "metrics.json").read_text())["understood"]
    )
    lines = (tmp_path / "run" / "mem-p1-seed0" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 31))


class Stopping(FollowingLM):
    """Is interrupted at a call."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def complete(self, prompts, **more):
        if len(self.calls) == self.at:
            raise KeyboardInterrupt
        return super().complete(prompts, **more)


def test_a_stopped_stream_goes_on_and_asks_nothing_again(tmp_path):
    plan = [Variant("mem", 1.0, 0)]
    cache = AnswersCache(tmp_path / "answers")
    stopping, going_on, unbroken, idle = Stopping(2), FollowingLM(), FollowingLM(), FollowingLM()
    with pytest.raises(KeyboardInterrupt):
        run_streams(experiment(tmp_path / "one", CachedLM(stopping, cache)), STREAMS, plan)
    kept = experiment(tmp_path / "one", CachedLM(going_on, cache))
    (one,) = run_streams(kept, STREAMS, plan)
    (other,) = run_streams(experiment(tmp_path / "two", unbroken), STREAMS, plan)
    assert (one.taken, one.metrics) == (other.taken, other.metrics)
    before, then = sum(stopping.calls), sum(going_on.calls)
    assert 0 < before < before + then <= sum(unbroken.calls)
    (again,) = run_streams(experiment(tmp_path / "one", idle), STREAMS, plan)
    assert (idle.calls, again.taken) == ([], one.taken)


def test_a_folder_of_another_experiment_or_stream_is_refused(tmp_path):
    plan = [Variant("no-mem", 0.0, 0)]
    run_streams(experiment(tmp_path / "run", FollowingLM()), STREAMS, plan)
    with pytest.raises(ArtifactError, match="was made with threshold -5.0, this run asks for -4"):
        run_streams(experiment(tmp_path / "run", FollowingLM(), threshold=-4.0), STREAMS, plan)
    with pytest.raises(ArtifactError, match="was made of another stream"):
        run_streams(experiment(tmp_path / "run", FollowingLM()), {0: stream(9)}, plan)
    (tmp_path / "run" / "no-mem-seed0" / "steps.jsonl").write_text("{")
    with pytest.raises(ArtifactError, match="is damaged .*: delete it and run it again"):
        run_streams(experiment(tmp_path / "run", FollowingLM()), STREAMS, plan)


def test_a_gate_that_is_chosen_keeps_like_and_unlike_apart():
    ways = {way.id: way for way in FAMILY.phrasings}
    family = replace(FAMILY, phrasings=[ways["syn0"], ways["ant0"]])
    report = choose_gate(stream(20, family=family), EditLookup)
    assert (report.threshold, report.precision, report.recall) == (0.0, 1.0, 1.0)
