import numpy as np
import pytest
from conftest import reader_inputs

from pgra.core import Example
from pgra.errors import ConfigError, DataError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs, check_labels

TEMPLATE = "{text} It was <extra_id_0> ."
VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, TEMPLATE)
LONG = "The film is a warm and funny portrait of a family by the sea. " * 6


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture
def build(tokenizer):
    def run(examples, evidence, **layout):
        chosen = SegmentLayout(layout.pop("template", TEMPLATE), **layout)
        return build_inputs(examples, evidence, tokenizer, VERBALIZER, layout=chosen)

    return run


@pytest.fixture
def show(tokenizer):
    """Give an input's segments as text; the tiny tokenizer's pieces join to what they came from."""

    def run(item):
        return [tokenizer.decode(s[:-1], skip_special_tokens=False) for s in item.segments]

    return run


def _example(text="A dull story.", name="test-0", label="negative"):
    return Example(name, {"text": text}, label)


@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
@pytest.mark.parametrize(
    "template",
    [TEMPLATE, "{text} ? <extra_id_0> ,", "<extra_id_0> : {text}", "{text} <extra_id_0>"],
)
def test_a_segments_tokens_are_those_of_its_whole_text(reader_dir, order, template):
    tokenizer = load_tokenizer(find_model(str(reader_dir)))
    evidence = [["Red apples.", "Blue sea."], ["Blue sea.", "The river Main, 1925!"], []]
    texts = ["A dull story.", "Warm", "It's, well: great"]
    labels = ["negative", "positive", None]
    examples = [_example(t, f"e-{i}", labels[i]) for i, t in enumerate(texts)]
    layout = SegmentLayout(template, order)
    built = build_inputs(examples, evidence, tokenizer, VERBALIZER, layout=layout)
    queries = [template.format(text=text) for text in texts]
    whole = [
        tuple(f"{q} {e}" if order == "query_first" else f"{e} {q}" for e in found) or (q,)
        for q, found in zip(queries, evidence, strict=True)
    ]
    items = [(f"e-{i}", segments, labels[i]) for i, segments in enumerate(whole)]
    expected = reader_inputs(tokenizer, VERBALIZER, items)
    for one, other in zip(built, expected, strict=True):
        assert one.example_id == other.example_id
        assert [s.tolist() for s in one.segments] == [s.tolist() for s in other.segments]
        np.testing.assert_equal(one.target, other.target)
    assert built.labels == labels
    assert built.sizes() == [sum(map(len, row.segments)) for row in expected]


def test_each_text_is_tokenised_once(tokenizer, build, monkeypatch):
    given = []
    plain = type(tokenizer).__call__

    def spy(self, texts, **kwargs):
        given.extend(texts)
        return plain(self, texts, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", spy)
    build([_example("Warm", "a"), _example("Dull", "b")], [["Sea.", "Town."], ["Town.", "Sea."]])
    assert sorted(t for t in given if "It was" not in t and t.startswith(" ")) == [
        " Sea.",
        " Town.",
    ]


@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
def test_evidence_is_cut_first_and_the_query_stays_whole(build, show, order, caplog):
    caplog.set_level("INFO")
    built = build([_example()], [[LONG, "the sea"]], order=order, max_tokens=60)
    query = "A dull story. It was <extra_id_0> ."
    (item,) = built
    long, short = (text.replace(" ", "") for text in show(item))
    assert query.replace(" ", "") in long
    assert short.replace(query.replace(" ", ""), "") == "thesea"
    assert "cut to 60 tokens: 0 of 1 queries, 1 of 2 evidence texts" in caplog.text
    kept = long.replace(query.replace(" ", ""), "")
    assert kept
    assert LONG.replace(" ", "").startswith(kept)
    assert len(item.segments[0]) == 60


@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
def test_a_long_query_loses_its_own_text_never_its_slot(build, show, order):
    template = "Review: {text} It was <extra_id_0> ."
    built = build(
        [_example(LONG)], [["Red apples."]], order=order, template=template, max_tokens=50
    )
    (item,) = built
    (segment,) = (text.replace(" ", "") for text in show(item))
    assert "Review:Thefilm" in segment
    assert "Itwas<extra_id_0>." in segment
    assert 45 < len(item.segments[0]) <= 50


def test_the_longest_field_is_cut_and_then_the_next(build, show):
    example = Example("test-0", {"premise": LONG, "claim": "The sea is blue."}, "negative")
    template = "{premise} ? <extra_id_0> , {claim}"
    (item,) = build([example], [[]], template=template, max_tokens=60)
    assert show(item)[0].replace(" ", "").endswith("?<extra_id_0>,Theseaisblue.")
    (item,) = build([example], [[]], template=template, max_tokens=12)
    text = show(item)[0].replace(" ", "")
    assert text.startswith("?<extra_id_0>,T")
    assert not text.endswith("blue.")
    assert len(item.segments[0]) <= 12


def test_a_template_longer_than_the_limit_is_refused(build):
    with pytest.raises(ConfigError, match=r"max_segment_tokens \(8\) is less than the reader temp"):
        build([_example()], [[]], max_tokens=8)


def test_a_field_that_examples_lack_is_refused(build):
    with pytest.raises(ConfigError, match=r"unknown input 'texts'. Did you mean 'text'"):
        build([_example()], [[]], template="{texts} It was")


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigError, match=r"unknown segment order 'query'"):
        SegmentLayout(TEMPLATE, "query")


def test_one_list_of_evidence_an_example_is_asked_for(build):
    with pytest.raises(ValueError, match="1 examples, 2 lists of evidence"):
        build([_example()], [[], []])


def test_braces_in_a_text_are_text(tokenizer, build):
    (item,) = build([_example("a {b} c")], [["{d}"]], template="{text} was")
    assert item.segments[0].tolist() == tokenizer("a {b} c was {d}").input_ids


def test_a_label_that_the_task_lacks_is_refused(build):
    with pytest.raises(DataError, match="'test-0' has label 'meh', the task knows: negative, pos"):
        build([_example(label="meh")], [[]])


def test_an_example_to_learn_from_needs_a_label(build):
    built = build([_example(label=None)], [[]])
    with pytest.raises(DataError, match="'test-0' has label None, the task knows: a, b"):
        check_labels(built.example_ids, built.labels, ["a", "b"])
