"""Each query's own prefix: who stands in it, in which order, and who never does."""

from functools import partial

import numpy as np
import pytest
from conftest import with_rerank, with_retriever

from pgra.core import ALONE, Example
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.exemplars.prompt import NearestExemplars
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.stages import Stages
from pgra.prompts.template import PromptTemplate
from pgra.retrieval.neighbors import Neighbors

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


def test_a_runs_prompt_is_shown_as_short_as_the_lm_reads_it(args):
    shown = []
    for limit in (200, None):
        found = Stages.read(with_rerank(args, exemplars="knn", max_prompt_tokens=limit), ALONE)
        found.open()
        found.exemplars.look_up(found.data.test[:1])
        (prompt,) = found.reranker.prompts(found.data.test[0])
        tokens = len(found.reranker.encoder.lm.tokenize([prompt])[0])
        shown.append((prompt.count("The answer is"), tokens))
    (few, tokens), (every, whole) = shown
    assert 1 < few < every == 4 + 1
    assert tokens <= 200 < whole


def test_too_few_training_examples_are_refused(neighbors):
    exemplars_of(neighbors, count=6)
    with pytest.raises(ConfigError, match="num_exemplars is 7, .* only 7 of them: ask for fewer"):
        exemplars_of(neighbors, count=7)


@pytest.mark.parametrize("kind", ["encoder", "reader"])
def test_a_task_keeps_all_training_examples(args, kind):
    nearest = with_retriever(with_rerank(args, exemplars="knn"), neighbor_encoder=kind)
    found, fixed = Stages.read(nearest, ALONE), Stages.read(args, ALONE)
    assert found.prompt.prefix == ""
    assert len(found.data.train) == len(fixed.data.train) + 4
    found.exemplars.look_up(found.data.test[:1])
    told = found.exemplars.neighbors.fingerprint["encoder"]
    assert ("part" in told) == (kind == "reader")
    assert fixed.exemplars is None
