"""Each query's own prefix: who stands in it, in which order, and who never does."""

from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
from conftest import with_rerank, with_retriever
from test_trained import RECORD

from pgra.core import Example
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.exemplars.prompt import NearestExemplars
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.pgra import open_stages, read_task
from pgra.prompts.template import PromptTemplate
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.retrieval.neighbors import Neighbors
from pgra.runs import _arguments, _begin

TEMPLATE = PromptTemplate("Does the following sentence have a sentiment?\n{text}")
WORDS = {"negative": "terrible", "positive": "great"}
TEXTS = [
    "A great film about the sea.",
    "A dull story of a town.",
    "The cast was warm and funny.",
    "A  GREAT film about the sea. ",  # a copy of the first, but for case and spaces
    "A terrible album.",
    "He was born in 1925.",
    "Lifeless actors in a garden.",
]
TRAIN = [
    Example(f"train-{i}", {"text": text}, "negative" if i in (1, 4, 6) else "positive")
    for i, text in enumerate(TEXTS)
]
NEW = [Example("test-0", {"text": "The boats came home."}), Example("test-1", {"text": "Red sea"})]


@pytest.fixture
def neighbors(encoder_dir, tmp_path):
    return Neighbors(partial(Encoder.from_name, str(encoder_dir), device="cpu"), TRAIN, tmp_path)


def exemplars_of(neighbors, count=3):
    return NearestExemplars(neighbors, TEMPLATE, WORDS, count=count)


def by_hand(neighbors, query, count):
    """Sort all others by their cosine with the query; of copies only the first counts."""
    encoder = neighbors.encoder
    close = encoder.encode(TEXTS) @ encoder.encode([query.text])[0]
    own = query.text.strip().lower().split()
    order = [row for row in np.argsort(-close) if row != 3 and TEXTS[row].lower().split() != own]
    return order[:count]


def test_exemplars_are_the_nearest_other_texts_nearest_first(neighbors):
    queries = [*NEW, TRAIN[1]]
    exemplars = exemplars_of(neighbors)
    exemplars.look_up(queries)
    for query in queries:
        expected = [f"train-{row}" for row in by_hand(neighbors, query, 3)]
        assert [e.id for e in exemplars.of(query)] == expected


def test_no_query_and_no_copy_of_it_stands_in_its_own_prefix(neighbors):
    exemplars = exemplars_of(neighbors, count=5)
    exemplars.look_up(TRAIN)
    for place in (0, 3):  # copies of each other
        assert {e.id for e in exemplars.of(TRAIN[place])} == {f"train-{i}" for i in (1, 2, 4, 5, 6)}
    # The control: plainly asked, a training query's nearest are itself and its copy.
    assert set(neighbors.nearest(TRAIN[:1], 2).rows[0].tolist()) == {0, 3}
    assert all(query.id not in {e.id for e in exemplars.of(query)} for query in TRAIN)


def test_few_other_texts_make_a_short_prefix(neighbors):
    exemplars = exemplars_of(neighbors, count=6)
    exemplars.look_up([TRAIN[0]])
    assert len(exemplars.of(TRAIN[0])) == 5


def test_neighbors_do_not_depend_on_who_asks_beside(neighbors):
    queries = [*NEW, *TRAIN]
    together, alone = exemplars_of(neighbors), exemplars_of(neighbors)
    together.look_up(queries)
    for query in reversed(queries):
        alone.look_up([query])
    assert [together.of(q) for q in queries] == [alone.of(q) for q in queries]
    shown = {tuple(e.id for e in together.of(query)) for query in queries}
    assert len(shown) > 3  # the control: prefixes differ


def test_vectors_are_encoded_once(neighbors, encoder_dir, tmp_path, monkeypatch):
    first = neighbors.vectors()
    monkeypatch.setattr(Neighbors, "encode", lambda *_: pytest.fail("encoded again"))
    again = Neighbors(partial(Encoder.from_name, str(encoder_dir), device="cpu"), TRAIN, tmp_path)
    np.testing.assert_array_equal(again.vectors(), first)
    other = Neighbors(again._open, TRAIN[1:], tmp_path)
    with pytest.raises(pytest.fail.Exception, match="encoded again"):  # the control
        other.vectors()


def test_the_prompt_shows_the_nearest_first_with_their_words(neighbors):
    exemplars = exemplars_of(neighbors, count=2)
    exemplars.look_up(NEW)
    chosen = exemplars.of(NEW[0])
    prompt = exemplars.prompt(chosen)
    blocks = prompt.prefix.removeprefix("Follow the demonstrations:\n").split("\n\n")
    assert blocks == [TEMPLATE.render_exemplar(e.fields, WORDS[e.label]) for e in chosen]
    assert prompt.exemplar_ids == tuple(e.id for e in chosen)
    assert exemplars.prompt(()).prefix == ""


def test_a_query_that_does_not_fit_drops_the_least_similar_exemplars(neighbors, lm_dirs):
    exemplars = exemplars_of(neighbors, count=5)
    exemplars.look_up(NEW)
    lm, bare = CausalLM.from_name(str(lm_dirs["gpt2"])), exemplars.prompt(())
    whole = exemplars.encoder_for(PromptedEncoder(lm, bare), NEW[0])
    assert (len(whole.prompt.exemplar_ids), exemplars.num_shortened) == (5, 0)
    (asked,) = whole.tokenize([NEW[0].fields]).ids
    less = PromptedEncoder(lm, bare, max_prompt_tokens=len(asked) - 1)
    shorter = exemplars.encoder_for(less, NEW[0])
    assert shorter.prompt.exemplar_ids == whole.prompt.exemplar_ids[:4]
    assert (exemplars.num_shortened, shorter.num_cut) == (1, 0)


def test_a_runs_prompt_is_shown_as_short_as_the_lm_reads_it(args, tmp_path):
    shown = []
    for limit in (200, None):
        one = with_rerank(args, exemplars="knn", max_prompt_tokens=limit)
        found = read_task(one)
        open_stages(found, one)
        found.exemplars.look_up(found.splits.test[:1])
        training = ReaderTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        _begin(tmp_path, {}, one, training, found)
        told = (tmp_path / "prompt.txt").read_text()
        shown.append(
            (told.count("The answer is"), len(found.reranker.encoder.lm.tokenize([told])[0]))
        )
    (few, tokens), (every, whole) = shown
    assert 1 < few < every == 4 + 1
    assert tokens <= 200 < whole


def test_a_later_run_keeps_the_dtype_of_what_found_the_exemplars(args, tmp_path):
    """On another device `auto` would take another, and the run's reranker would be refused."""
    args = with_retriever(with_rerank(args, exemplars="knn"), retriever="bm25")
    for kind, expected in (("encoder", "bfloat16"), ("reader", "auto")):
        one = with_retriever(args, neighbor_encoder=kind)
        told = {
            "encoder": "ab",
            "dtype": "bfloat16",
            **({"part": "T5"} if kind == "reader" else {}),
        }
        made = {"reranker": {"dtype": "float32", "exemplar encoder": told}}
        record = replace(RECORD, arguments=asdict(one), fingerprints=made)
        again = _arguments(tmp_path, record, {"device": "cpu"})
        assert (again.retriever.encoder_dtype, again.rerank.lm_dtype) == (expected, "float32")


def test_too_few_training_examples_are_refused(neighbors):
    exemplars_of(neighbors, count=6)
    with pytest.raises(ConfigError, match="num_exemplars is 7, .* only 7 of them: ask for fewer"):
        exemplars_of(neighbors, count=7)


@pytest.mark.parametrize("kind", ["encoder", "reader"])
def test_a_task_keeps_all_training_examples(args, kind):
    found = read_task(with_retriever(with_rerank(args, exemplars="knn"), neighbor_encoder=kind))
    fixed = read_task(args)
    assert found.prompt.prefix == ""
    assert len(found.splits.train) == len(fixed.splits.train) + 4
    found.exemplars.look_up(found.splits.test[:1])
    told = found.exemplars.neighbors.fingerprint["encoder"]
    assert ("part" in told) == (kind == "reader")
    assert fixed.exemplars is None
