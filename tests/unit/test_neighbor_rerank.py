"""The reranker with a prefix a query, against every whole prompt read alone by the LM."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from small_reranking import QUERIES, ROWS, TEMPLATE, TRAIN, WORDS, plain_lm, run

from pgra.context import Context
from pgra.encoders.encoder import Encoder
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selector import NearestExemplars, build_prompt
from pgra.prompts import PromptFormat
from pgra.rerank import RerankRequest, open_reranker
from pgra.rerank.base import RerankArguments
from pgra.retrieval.neighbors import Neighbors

pytestmark = pytest.mark.slow


@pytest.fixture
def open_one(corpus, encoder_dir, tmp_path):
    """Give a reranker; with another artefacts folder its bank is another."""

    def build(lm_dir, *, count=3, artifacts=None, shard_rows=4, **changes):
        encoder = partial(Encoder, str(encoder_dir), device="cpu")
        neighbors = Neighbors(encoder, TRAIN, tmp_path / "near")
        chosen = SelectionArguments(num_exemplars=count)
        exemplars = NearestExemplars(neighbors, PromptFormat(TEMPLATE, WORDS), chosen)
        request = RerankRequest(
            args=RerankArguments(
                **{"exemplars": "knn", "lm": str(lm_dir), "lm_dtype": "float32", **changes},
                bank_shard_rows=shard_rows,
            ),
            prompt=exemplars.prompt(()),
            corpus=corpus,
            context=Context(artifacts=artifacts or tmp_path / "artifacts", device="cpu"),
            exemplars=exemplars,
        )
        return open_reranker(request)

    return build


@cache
def state_by_hand(lm_dir, prompt):
    lm, tokenizer = plain_lm(lm_dir)
    with torch.no_grad():
        return lm(**tokenizer(prompt, return_tensors="pt")).last_hidden_state[0, -1]


def scores_by_hand(lm_dir, reranker, query, rows, *, cosine=False, prompt=None):
    """Read the query and each candidate whole, with everything that stands before them."""
    prompt = prompt or reranker.exemplars.prompt(reranker.exemplars.of(query))
    texts = [query.text, *reranker.corpus.texts(rows)]
    whole = [prompt.prefix + prompt.suffix({"text": text}) for text in texts]
    asked, *states = [state_by_hand(lm_dir, prompt) for prompt in whole]
    scores = [float(state @ asked) for state in states]
    lengths = [float(state.norm() * asked.norm()) for state in states]
    return np.array([s / n if cosine else s for s, n in zip(scores, lengths, strict=True)])


def by_row(candidates, query):
    return dict(
        zip(candidates.rows[query].tolist(), candidates.scores[query].tolist(), strict=True)
    )


def test_scores_are_those_of_whole_prompts_read_alone(lm_dir, open_one):
    for cosine in (False, True):
        reranker = open_one(lm_dir, similarity="cosine" if cosine else "dot")
        found, work = run(reranker)
        assert work.num_new == (0 if cosine else 11)  # the other costs nothing
        for place, query in enumerate(QUERIES):
            rows = [row for row in ROWS[place] if row >= 0]
            expected = scores_by_hand(lm_dir, reranker, query, rows, cosine=cosine)
            ours = by_row(found, place)
            np.testing.assert_allclose([ours[row] for row in rows], expected, rtol=1e-4, atol=1e-4)
            assert found.scores[place].tolist() == sorted(found.scores[place], reverse=True)
        assert (found.rows[1, -1], found.scores[1, -1]) == (-1, -np.inf)
    # The control: under one prompt for all, scores are others.
    fixed = build_prompt(TEMPLATE, TRAIN, WORDS, num_exemplars=3, seed=1)
    other = scores_by_hand(lm_dir, reranker, QUERIES[0], ROWS[0], cosine=True, prompt=fixed)
    ours = np.array([by_row(found, 0)[row] for row in ROWS[0]])
    assert np.abs(other - ours).max() > 1e-3


def test_what_was_read_costs_nothing(lm_dirs, open_one):
    first, work = run(open_one(lm_dirs["gpt2"]))
    assert work.num_new == 4 + 3 + 4
    fewer, work = run(open_one(lm_dirs["gpt2"]), rows=ROWS[:, :2])
    assert (work.num_new, fewer.rows.shape) == (0, (3, 2))
    _, work = run(open_one(lm_dirs["gpt2"]), rows=np.hstack([ROWS, [[8], [8], [8]]]))
    assert work.num_new == 3
    reranker = open_one(lm_dirs["gpt2"], count=2)
    second, work = run(reranker)
    assert work.num_new == 11
    assert np.abs(second.scores[0] - first.scores[0]).max() > 1e-3
