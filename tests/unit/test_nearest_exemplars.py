"""Each query's own prefix: who stands in it, in which order, and who never does."""

from functools import partial

import numpy as np
import pytest
from conftest import with_rerank

from pgra.context import ALONE
from pgra.encoders.encoder import Encoder
from pgra.exemplars import VECTOR_METRICS, SelectionArguments
from pgra.exemplars.selection import ExemplarPool, VectorSimilarity
from pgra.exemplars.selector import NearestExemplars
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.stages import Stages
from pgra.prompts import PromptFormat, PromptTemplate
from pgra.retrieval.neighbors import Neighbors
from pgra.types import Example

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
    load = partial(Encoder, str(encoder_dir), normalize=False, device="cpu")
    return Neighbors(load, TRAIN, tmp_path)


ROWS = np.array([0, 1, 2, 4, 6])


def by_definition(metric, a, b):
    if metric == "euclidean":
        return -np.sqrt(((a - b) ** 2).sum())
    product = (a * b).sum()
    return product / np.sqrt((a**2).sum() * (b**2).sum()) if metric == "cosine" else product


@pytest.mark.parametrize("metric", VECTOR_METRICS)
def test_nearest_and_farthest_follow_the_definition(neighbors, metric):
    similarity = VectorSimilarity(neighbors, metric)
    pool = neighbors.vectors().astype(np.float64)
    asked = neighbors.encoder.encode_examples(NEW).astype(np.float64)
    every = np.array([[by_definition(metric, q, pool[row]) for row in ROWS] for q in asked])
    near, far = similarity.nearest(NEW, ROWS, 3), similarity.nearest(NEW, ROWS, 3, sign=-1)
    np.testing.assert_array_equal(near.rows, ROWS[np.argsort(-every)[:, :3]])
    np.testing.assert_array_equal(far.rows, ROWS[np.argsort(every)[:, :3]])
    np.testing.assert_allclose(near.scores, -np.sort(-every)[:, :3], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(far.scores, -np.sort(every)[:, :3], rtol=1e-4, atol=1e-5)


def test_a_query_that_does_not_fit_drops_the_least_similar_exemplars(neighbors, lm_dirs):
    args = SelectionArguments(num_exemplars=5)
    exemplars = NearestExemplars(neighbors, PromptFormat(TEMPLATE, WORDS), args)
    exemplars.look_up(NEW)
    lm, bare = CausalLM(str(lm_dirs["gpt2"])), exemplars.prompt(())
    whole = exemplars.encoder_for(PromptedEncoder(lm, bare), NEW[0])
    assert len(whole.prompt.exemplar_ids) == 5
    (asked,) = whole.tokenize([NEW[0].fields]).ids
    less = PromptedEncoder(lm, bare, max_prompt_tokens=len(asked) - 1)
    shorter = exemplars.encoder_for(less, NEW[0])
    assert shorter.prompt.exemplar_ids == whole.prompt.exemplar_ids[:4]


@pytest.mark.parametrize("name", ["knn", "test_selection:LastFirst"])
def test_any_selector_chooses_for_pgra_as_it_does_for_kate(args, name):
    found = Stages.read(with_rerank(args, exemplars=name, exemplar_seed=5), ALONE)
    assert found.prompt.prefix == ""
    assert len(found.data.train) == len(Stages.read(args, ALONE).data.train) + 4  # none is left out
    (query,) = found.data.test[:1]
    found.search([query])
    selection = SelectionArguments(num_exemplars=4, exemplars=name, exemplar_seed=5)
    pool = ExemplarPool(found.data.train, jaccard=selection.leak_jaccard)
    chosen = selection.selector(selection, pool, VectorSimilarity(found.exemplars.neighbors, "dot"))
    rows = chosen.choose([query]).of(0)
    assert list(found.exemplars.of(query)) == [found.data.train[row] for row in rows]
    assert found.reranker.fingerprint["exemplars"] == name
