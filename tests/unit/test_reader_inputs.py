import pytest
from tokenizers import normalizers

from pgra.errors import ConfigError, DataError
from pgra.models.loading import find_model, load_tokenizer
from pgra.reader.inputs import SegmentLayout, build_inputs, check_labels, count_tokens
from pgra.types import Example, ReaderInput

TEMPLATE = "{text} It was <extra_id_0> ."
LONG = "The film is a warm and funny portrait of a family by the sea. " * 6


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


def _example(text="A dull story.", name="test-0", label="negative"):
    return Example(name, {"text": text}, label)


def test_a_segment_is_the_query_and_one_evidence_in_either_order(tokenizer):
    evidence = [["Red apples.", "Blue sea."]]
    query = "A dull story. It was <extra_id_0> ."
    built = build_inputs([_example()], evidence, tokenizer, layout=SegmentLayout(TEMPLATE))
    assert built.inputs == [
        ReaderInput("test-0", (f"{query} Red apples.", f"{query} Blue sea."), "negative")
    ]
    assert (built.queries_cut, built.evidence_cut) == (0, 0)
    first = SegmentLayout(TEMPLATE, order="evidence_first")
    built = build_inputs([_example()], evidence, tokenizer, layout=first)
    assert built.inputs[0].segments == (f"Red apples. {query}", f"Blue sea. {query}")


def test_without_evidence_there_is_one_segment_the_query(tokenizer):
    examples = [_example(), _example("A great film.", "test-1", None)]
    built = build_inputs(examples, [[], ["Sea."]], tokenizer, layout=SegmentLayout(TEMPLATE))
    assert [item.segments for item in built.inputs] == [
        ("A dull story. It was <extra_id_0> .",),
        ("A great film. It was <extra_id_0> . Sea.",),
    ]
    assert built.inputs[1].label is None


def test_a_character_of_several_tokens_is_cut_whole(t5_dir):
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()  # an ellipsis becomes three dots
    layout = SegmentLayout(
        TEMPLATE, max_tokens=count_tokens(["a It was <extra_id_0> ."], tokenizer)[0] + 2
    )
    built = build_inputs([_example("a")], [["…"]], tokenizer, layout=layout)
    assert built.inputs[0].segments == ("a It was <extra_id_0> .",)
    assert built.evidence_cut == 1


@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
def test_evidence_is_cut_first_and_the_query_stays_whole(tokenizer, order):
    layout = SegmentLayout(TEMPLATE, order, max_tokens=60)
    query = "A dull story. It was <extra_id_0> ."
    built = build_inputs([_example()], [[LONG, "Sea."]], tokenizer, layout=layout)
    long, short = built.inputs[0].segments
    assert query in long
    assert short == layout.join(query, "Sea.")
    assert built.evidence_cut == 1
    assert built.queries_cut == 0
    kept = long.replace(query, "").strip()
    assert LONG.startswith(kept)
    assert kept
    assert 55 < count_tokens([long], tokenizer)[0] <= 60


@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
def test_a_long_query_loses_its_own_text_never_its_slot(tokenizer, order):
    layout = SegmentLayout("Review: {text} It was <extra_id_0> .", order, max_tokens=50)
    built = build_inputs([_example(LONG)], [["Red apples."]], tokenizer, layout=layout)
    (segment,) = built.inputs[0].segments
    assert segment.startswith("Review: The film")
    assert segment.endswith("It was <extra_id_0> .")
    assert built.queries_cut == 1
    assert built.evidence_cut == 1
    assert count_tokens([segment], tokenizer)[0] <= 50


def test_the_longest_field_is_cut(tokenizer):
    example = Example("test-0", {"premise": LONG, "claim": "The sea is blue."}, "yes")
    layout = SegmentLayout("{premise} ? <extra_id_0> , {claim}", max_tokens=60)
    (item,) = build_inputs([example], [[]], tokenizer, layout=layout).inputs
    assert item.segments[0].endswith("? <extra_id_0> , The sea is blue.")


def test_a_template_longer_than_the_limit_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"max_segment_tokens \(8\) is less than the reader temp"):
        build_inputs([_example()], [[]], tokenizer, layout=SegmentLayout(TEMPLATE, max_tokens=8))


def test_a_field_that_examples_lack_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"unknown input 'texts'. Did you mean 'text'"):
        build_inputs([_example()], [[]], tokenizer, layout=SegmentLayout("{texts} It was"))


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigError, match=r"unknown segment order 'query'"):
        SegmentLayout(TEMPLATE, "query")


def test_one_list_of_evidence_an_example_is_asked_for(tokenizer):
    with pytest.raises(ValueError, match="1 examples, 2 lists of evidence"):
        build_inputs([_example()], [[], []], tokenizer, layout=SegmentLayout(TEMPLATE))


def test_braces_in_a_text_are_text(tokenizer):
    (item,) = build_inputs(
        [_example("a {b} c")], [["{d}"]], tokenizer, layout=SegmentLayout("{text} was")
    ).inputs
    assert item.segments == ("a {b} c was {d}",)


def test_an_example_to_learn_from_needs_a_known_label():
    with pytest.raises(DataError, match="'test-0' has label None, the task knows: a, b"):
        check_labels([ReaderInput("test-0", ("x",))], ["a", "b"])
