"""Passages of 100 words (the paper's Figure 5): cut from documents, read without losing the query.

The released code puts the evidence first and cuts segments on the right, at 128 tokens, so a
passage takes the question and the slot with it; here the evidence is what is cut.
"""

import pytest

from pgra.core import Example
from pgra.data.bundled import bundled_corpus_file
from pgra.data.corpus import cut_words
from pgra.data.tasks import load_task, task_names
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import SLOT, Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs

PASSAGE = " ".join(f"garden{'s' * (i % 2)} by the sea" for i in range(25))


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


def segments_of(tokenizer, name, order, limit):
    """Give a short query of the task, and its one segment with a passage."""
    task = load_task(name)
    query = Example("q", {field: f"A {field} by the sea." for field in task.inputs}, task.labels[0])
    verbalizer = Verbalizer(task.verbalizer, task.reader_template)
    layout = SegmentLayout(task.reader_template, order, limit)
    built = build_inputs([query], [[PASSAGE]], tokenizer, verbalizer, layout=layout)
    return task.reader_template.format_map(query.fields), built[0].segments[0]


def holds(ids, part):
    ids, part = list(ids), list(part)
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
@pytest.mark.parametrize("limit", [128, 160])
def test_a_long_passage_takes_neither_the_query_nor_its_slot(tokenizer, name, order, limit):
    query, segment = segments_of(tokenizer, name, order, limit)
    behind = "" if order == "query_first" else " "
    assert holds(segment, tokenizer(behind + query, add_special_tokens=False).input_ids)
    assert (SLOT in query) == (tokenizer.convert_tokens_to_ids(SLOT) in segment)
    assert len(segment) == limit
    assert segment[-1] == tokenizer.eos_token_id


def test_cut_on_the_right_it_would_have_taken_both(tokenizer):
    """What the released code does, and the control of the test above."""
    query, _ = segments_of(tokenizer, "sst2", "evidence_first", 128)
    cut = tokenizer(f"{PASSAGE} {query}", truncation=True, max_length=128).input_ids
    assert tokenizer.convert_tokens_to_ids(SLOT) not in cut
    assert not holds(cut, tokenizer(f" {query}", add_special_tokens=False).input_ids)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["query_first", "evidence_first"])
def test_real_passages_fill_128_tokens_alone_and_fit_256_with_a_query(order):
    """Of 3,939 passages T5 makes 147 tokens each on average, and 127 or more of 93 %."""
    tokenizer = load_tokenizer(find_model("bundled:t5-small-titles"))
    article = bundled_corpus_file("wikipedia-articles").read_text().splitlines()[0]
    found = cut_words(article, 100)[:20]
    task = load_task("sst2")
    query = Example("q", {"text": "a warm , funny and moving film by the sea ."}, "positive")
    verbalizer = Verbalizer(task.verbalizer, task.reader_template)
    cut = []
    for limit in (128, 256):
        layout = SegmentLayout(task.reader_template, order, limit)
        built = build_inputs([query], [found], tokenizer, verbalizer, layout=layout)
        for segment in built[0].segments:
            assert tokenizer.convert_tokens_to_ids(SLOT) in segment
            assert "a warm , funny and moving film by the sea ." in tokenizer.decode(segment)
        lengths = [len(segment) for segment in built[0].segments]
        cut.append(sum(length == limit for length in lengths))
    assert cut == [20, 0]
