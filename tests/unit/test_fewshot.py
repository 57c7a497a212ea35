"""Prefixes: which exemplars, in what order, in what words."""

from collections import Counter

import pytest

from pgra.core import Example
from pgra.errors import ConfigError
from pgra.exemplars.prompt import build_prompt
from pgra.prompts.template import PromptTemplate, check_template

LABELS = ["a", "b", "c"]
WORDS = {"a": "Apple", "b": "Bee", "c": "Cat"}
TEMPLATE = PromptTemplate("Which?\n{text}")
# 'c' is rare and late, as ABBR is in TREC
EXAMPLES = [
    Example(f"train-{i}", {"text": f"text {i}"}, "c" if i >= 37 else LABELS[i % 2])
    for i in range(40)
]


def labels_of(prompt):
    by_id = {e.id: e.label for e in EXAMPLES}
    return Counter(by_id[i] for i in prompt.exemplar_ids)


def test_a_prompt_is_exactly_what_the_paper_shows():
    two = [Example("1", {"text": "good"}, "a"), Example("2", {"text": "bad"}, "b")]
    prompt = build_prompt(TEMPLATE, two, WORDS, num_exemplars=2, seed=3)
    shown = {
        "1": "Which?\ngood\nThe answer is Apple",
        "2": "Which?\nbad\nThe answer is Bee",
    }
    first, second = prompt.exemplar_ids
    assert prompt.prefix == f"Follow the demonstrations:\n{shown[first]}\n\n{shown[second]}"
    assert prompt.suffix({"text": "new"}) == "\n\nWhich?\nnew\nThe answer is"


def test_without_exemplars_nothing_stands_before_the_text():
    prompt = build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=0)
    assert (prompt.prefix, prompt.suffix({"text": "new"})) == ("", "Which?\nnew\nThe answer is")


@pytest.mark.parametrize("method", ["balanced", "official", "random"])
def test_one_seed_gives_one_prefix_and_another_seed_another(method):
    one, same, other = (
        build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=8, method=method, seed=seed)
        for seed in (0, 0, 1)
    )
    assert one == same
    assert one.prefix != other.prefix
    assert len(set(one.exemplar_ids)) == len(one.exemplar_ids)


def test_balanced_exemplars_differ_by_at_most_one():
    counts = labels_of(build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=8))
    assert sorted(counts.values()) == [2, 3, 3]


def test_balanced_goes_on_when_a_label_runs_out():
    counts = labels_of(build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=15))
    assert (sum(counts.values()), counts["c"]) == (15, 3)


def test_official_takes_the_first_in_the_file_under_a_cap():
    prompt = build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=8, method="official")
    # cap 8 // 3 + 1 = 3: rows 0 to 5 give three a and three b; c appears at 37, 38, and 8 are full
    assert sorted(prompt.exemplar_ids, key=lambda i: int(i.split("-")[1])) == [
        f"train-{i}" for i in (0, 1, 2, 3, 4, 5, 37, 38)
    ]


def test_more_exemplars_than_examples_are_refused():
    with pytest.raises(ConfigError, match="num_exemplars is 50, but there are only 40"):
        build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=50)


def test_a_passage_fills_the_first_input():
    template = PromptTemplate("{a} / {b}?", inputs=("a", "b"))
    assert template.render(template.passage_fields("x")) == "x / ?"


def test_blank_lines_in_a_text_are_closed():
    assert TEMPLATE.render({"text": " one\n\ntwo "}) == "Which?\none\ntwo"


def test_braces_in_a_text_are_only_text():
    assert TEMPLATE.render({"text": "{text} {0} }{"}) == "Which?\n{text} {0} }{"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{sentence}", "unknown field in .* 'sentence'"),
        ("no slot", "holds no field; put {text} into it"),
        ("{text", "has a stray brace"),
        ("{}", "unknown field in .* ''"),
        ("{text.upper}", "unknown field in .* 'text.upper'"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(template, message):
    with pytest.raises(ConfigError, match=message):
        check_template(template, ["text"])
