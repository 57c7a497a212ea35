"""Ethical situations (ERT): our own, for the paper's were never released."""

import json
from dataclasses import replace

import pytest
import yaml
from following_lm import FollowingLM

from pgra.config import config_root
from pgra.errors import ConfigError, DataError
from pgra.lm.base import Completion
from pgra.memory.experiment import Experiment, plan_variants
from pgra.memory.families import judge_situation, load_family, read_verdict
from pgra.memory.lookup import EditLookup
from pgra.memory.prompts import load_few_shot
from pgra.memory.report import Trial, correlate, render_report, try_lookup
from pgra.memory.stream import PromptedLM, Simulation, read_stream, read_words

CAT, RULES = load_family("ert_cat"), load_family("ert_nl")
SITUATIONS = [
    {"situation": "giving a lift to a stranger in the rain", "category": "care", "label": "GOOD"},
    {"situation": "peeping at a rival's cards", "category": "Cheating", "label": "bad"},
    {"situation": "giving a lift to a stranger in the snow", "category": "care", "label": "OKAY"},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def steps(tmp_path):
    return read_stream(write(tmp_path / "ert.jsonl", SITUATIONS), CAT)


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("This question is about: loyalty. The answer is BAD.", ("loyalty", "bad")),
        ("this question is about loyalty The answer is bad", ("loyalty", "bad")),
        ("This question is about: a. b, and c. The answer is OKAY", ("a. b, and c", "okay")),
        ("This question is about: loyalty", ("loyalty", "")),
        ("The answer is GOOD.", ("", "")),
        ("It's about: harm. The answer is GOOD because it helps.", ("harm", "good")),
    ],
)
def test_an_output_is_read_for_its_understanding_and_its_label(output, verdict):
    assert read_verdict(output) == verdict


def test_understanding_and_label_are_judged_apart():
    right = "This question is about: care. The answer is GOOD."
    assert judge_situation(right, right) == (True, True)
    assert judge_situation(right.replace("care", "harm"), right) == (False, True)
    assert judge_situation(right.replace("GOOD", "OKAY"), right) == (True, False)
    assert judge_situation("", right) == (False, False)


def test_a_situation_becomes_a_question_with_its_category_as_feedback(steps):
    assert [step.kind for step in steps] == ["care", "cheating", "care"]
    assert steps[1].question == "peeping at a rival's cards"
    assert steps[1].feedback == "this question is about: cheating."
    assert steps[1].expected == ("This question is about: cheating. The answer is BAD.",)
    assert CAT.kinds[:2] == ["care", "loyalty"]
    assert len(CAT.kinds) == 10


def test_a_rule_of_thumb_is_a_meaning_of_its_own(tmp_path):
    rows = [{"situation": "s", "rule_of_thumb": rule, "label": "GOOD"} for rule in "aba"]
    steps = read_stream(write(tmp_path / "nl.jsonl", rows), RULES)
    assert RULES.kinds == ["situation"]
    assert [step.kind for step in steps] == ["situation"] * 3
    assert steps[0].meaning == steps[2].meaning != steps[1].meaning
    other = read_stream(write(tmp_path / "cat.jsonl", SITUATIONS), CAT)
    assert [step.meaning for step in other] == ["care", "cheating", "care"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "FINE"}, "line 1: label 'FINE' is none of GOOD, BAD, OKAY"),
        ({"category": "cars"}, "line 1: category 'cars' is none of care, loyalty"),
        ({"situation": ""}, "line 1: situation is '', and must be text: each line has situation,"),
        ({"category": None}, "line 1: category is None, and must be text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, message):
    path = write(tmp_path / "ert.jsonl", [SITUATIONS[0] | change])
    with pytest.raises(DataError, match=message):
        read_stream(path, CAT)


def test_without_the_data_it_is_said_what_to_give(tmp_path):
    with pytest.raises(DataError, match="was never released: give your own jsonl file, a line"):
        read_stream(tmp_path / "none.jsonl", CAT)
    with pytest.raises(DataError, match="is not made of words: give it --stream FILE"):
        read_words(tmp_path / "words.jsonl", CAT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": []}, "situations must have about, categories, feedback, labels, output"),
        ({"output": "about {about}"}, "output of situations must have {label}"),
        ({"feedback": "no"}, "feedback of situations must have {about}"),
    ],
)
def test_a_family_that_lacks_something_is_refused(tmp_path, change, message):
    values = yaml.safe_load((config_root() / "memory" / "ert_cat.yaml").read_text())
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(values | {"situations": values["situations"] | change}))
    with pytest.raises(ConfigError, match=message):
        load_family(str(path))


@pytest.mark.parametrize("family", [CAT, RULES], ids=lambda family: family.name)
def test_a_prompts_examples_are_outputs_of_its_family(family):
    for shown in load_few_shot(family.prompt).examples:
        about, label = read_verdict(shown.answer)
        assert label.upper() in family.situations.labels
        assert about in family.situations.categories or not family.situations.categories
        assert shown.feedback in ("", f"this question is about: {about}.")


class Guessing(FollowingLM):
    """Says what the question's clarification says, else "harm", and always GOOD."""

    def _go_on(self, prompt):
        question = prompt.split("\n\n###\n\n")[-2]
        about = question.rpartition("about: ")[2].rstrip(".") if "|" in question else "harm"
        text = f"This question is about: {about}. The answer is GOOD. END"
        return Completion(text, len(prompt.split()), len(text.split()))


def test_a_category_is_recalled_and_the_table_has_the_papers_labels(tmp_path, steps):
    lm = PromptedLM(few_shot=load_few_shot("ert_cat"), completer=Guessing(), max_new_tokens=32)
    simulation = Simulation(family=CAT, lm=lm)
    experiment = Experiment(
        folder=tmp_path / "run", simulation=simulation, open_lookup=EditLookup, threshold=-5.0
    )
    plan = plan_variants(["no-mem", "mem"], [1.0], [0])
    bare, mem = experiment.run({0: steps}, plan)
    assert [one.understood for one in bare.outcomes] == [False, False, False]
    assert [one.understood for one in mem.outcomes] == [False, False, True]
    assert [one.answered for one in mem.outcomes] == [True, False, False]
    text = render_report(CAT, [bare, mem], gate=None)
    assert text.count(" 0.483 |") == text.count(" 0.600 |") == 1
    assert "NO-MEM none; MEM-PROMPT, p = 1 -0.50. The paper has 0.36" in text


def test_a_gate_counts_by_meaning_and_writes_what_the_user_says(steps):
    said = []

    class Spy(EditLookup):
        def find(self, question, k=1):
            said.extend(entry.feedback for entry in self._log.entries())
            return super().find(question, k)

    trials = try_lookup([*steps, replace(steps[0], id="4")], Spy)
    assert trials[0] == Trial(None, is_right=False, has_right=False)
    assert [trial.is_right for trial in trials] == [False, False, True, True]
    assert set(said) == {"this question is about: care.", "this question is about: cheating."}


def test_a_correlation_of_outcomes_is_phi():
    assert correlate([True, True, False, False], [True, True, False, False]) == 1.0
    assert correlate([True, True, False, False], [True, False, True, False]) == 0.0
    assert correlate([True, True], [True, False]) is None
