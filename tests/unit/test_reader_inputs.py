"""What the reader reads: segments that fit, batches of like length."""

import pytest
from conftest import reader_inputs
from hypothesis import given
from hypothesis import strategies as st

from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts import Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs
from pgra.types import Example

TEMPLATE = "{text} It was <extra_id_0> ."
VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, TEMPLATE)
LONG = "The film is a warm and funny portrait of a family by the sea. " * 6


def content(inputs):
    return [
        (
            name,
            [s.tolist() for s in row.segments],
            None if row.target is None else row.target.tolist(),
        )
        for name, row in zip(inputs.example_ids, inputs, strict=True)
    ]


@pytest.fixture(scope="module")
def build(tokenizer):
    def run(examples, evidence, template=TEMPLATE, **layout):
        chosen = SegmentLayout(template, **layout)
        return build_inputs(examples, evidence, tokenizer, VERBALIZER, layout=chosen)

    return run


def example(text="A dull story.", name="test-0", label="negative"):
    return Example(name, {"text": text}, label)


def shown(tokenizer, item):
    """Return segments as text without spaces; the tiny tokenizer's pieces join to their source."""
    texts = [tokenizer.decode(s[:-1], skip_special_tokens=False) for s in item.segments]
    return [text.replace(" ", "") for text in texts]


# Segments.


@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
@pytest.mark.parametrize(
    "template",
    [TEMPLATE, "{text} ? <extra_id_0> ,", "<extra_id_0> : {text}", "{text} <extra_id_0>"],
)
def test_a_segments_tokens_are_those_of_its_whole_text(reader_dir, order, template):
    tokenizer = load_tokenizer(find_model(str(reader_dir)))
    evidence = [["Red apples.", "Blue sea."], ["Blue sea.", "The river Main, 1925!"], ["{d}"], []]
    texts = ["A dull story.", "Warm", "a {b} c", "It's, well: great"]
    labels = ["negative", "positive", None, None]
    examples = [example(t, f"e-{i}", labels[i]) for i, t in enumerate(texts)]
    layout = SegmentLayout(template, order)
    built = build_inputs(examples, evidence, tokenizer, VERBALIZER, layout=layout)
    queries = [template.format(text=text) for text in texts]
    whole = [
        tuple(f"{q} {e}" if order == "query_first" else f"{e} {q}" for e in found) or (q,)
        for q, found in zip(queries, evidence, strict=True)
    ]
    items = [(f"e-{i}", segments, labels[i]) for i, segments in enumerate(whole)]
    assert content(built) == content(reader_inputs(tokenizer, VERBALIZER, items))


@given(
    words=st.integers(1, 60),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    limit=st.integers(20, 90),
    order=st.sampled_from(["query_first", "evidence_first"]),
    template=st.sampled_from([TEMPLATE, "<extra_id_0> : {text}"]),
)
def test_evidence_is_cut_first_then_the_query_and_its_slot_never(
    tokenizer, build, words, lengths, limit, order, template
):
    text, evidence = " ".join(["sea"] * words), [" ".join(["town"] * n) for n in lengths]
    (item,) = build([example(text)], [evidence], template, order=order, max_tokens=limit)
    query = template.format(text=text)
    query_fits = len(tokenizer(query).input_ids) <= limit
    texts = zip(shown(tokenizer, item), evidence, item.segments, strict=True)
    for segment, passage, ids in texts:
        parts = (query, passage) if order == "query_first" else (passage, query)
        fits = len(tokenizer(" ".join(parts)).input_ids) <= limit
        assert template.format(text="").replace(" ", "") in segment
        assert (segment.count("sea") == words) == query_fits
        assert (segment.count("town") == len(passage.split())) == fits
        assert len(ids) <= limit
        assert fits or not query_fits or len(ids) == limit  # no room is left


def test_the_longest_field_is_cut_and_then_the_next(tokenizer, build):
    pair = Example("test-0", {"premise": LONG, "claim": "The sea is blue."}, "negative")
    template = "{premise} ? <extra_id_0> , {claim}"
    (item,) = build([pair], [[]], template, max_tokens=60)
    assert shown(tokenizer, item)[0].endswith("?<extra_id_0>,Theseaisblue.")
    (item,) = build([pair], [[]], template, max_tokens=12)
    (text,) = shown(tokenizer, item)
    assert text.startswith("?<extra_id_0>,T")
    assert not text.endswith("blue.")
    assert len(item.segments[0]) <= 12
