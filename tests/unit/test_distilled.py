"""A first stage that learns what the second makes of passages."""

import numpy as np
import pytest
from conftest import SENTENCES, with_rerank, with_retriever
from sklearn.linear_model import Ridge
from small_index import World
from test_stages import found_for

from pgra.cli import main
from pgra.core import ALONE
from pgra.errors import ConfigError
from pgra.methods.stages import Stages
from pgra.rerank.distilled import fit_ridge

RNG = np.random.default_rng(3)


@pytest.mark.parametrize(("n", "width"), [(60, 10), (20, 40)])  # more columns than examples, too
def test_a_map_is_the_ridge_regression_and_its_correlation_that_of_examples_left_out(n, width):
    vectors = RNG.normal(size=(n, width)).astype(np.float32)
    noise = RNG.normal(size=(n, 3)) * [1, 3, 9]
    values = (vectors @ RNG.normal(size=(width, 3)) + noise).astype(np.float32)
    found = fit_ridge(vectors, values)
    centred = (vectors - vectors.mean(axis=0)).astype(np.float64)
    alpha = found.penalty * (np.linalg.svd(centred, compute_uv=False) ** 2).mean()
    theirs = Ridge(alpha=alpha).fit(vectors.astype(np.float64), values)
    ours = vectors @ found.weights[:-1] + found.weights[-1]
    np.testing.assert_allclose(ours, theirs.predict(vectors), atol=1e-4)
    left_out = [
        Ridge(alpha=alpha).fit(np.delete(vectors, i, 0), np.delete(values, i, 0)).predict([row])[0]
        for i, row in enumerate(vectors)
    ]
    each = [np.corrcoef(a, b)[0, 1] for a, b in zip(np.transpose(left_out), values.T, strict=True)]
    expected = np.average(each, weights=values.var(axis=0))
    assert found.correlation == pytest.approx(expected, abs=1e-3)
    RNG.shuffle(values)
    assert fit_ridge(vectors, values).correlation < min(0.35, found.correlation)  # control


@pytest.mark.parametrize("similarity", ["dot", "head"])
def test_it_is_learnt_once_and_finds_what_it_foretells(args, similarity, caplog):
    caplog.set_level("INFO")
    args = with_rerank(with_retriever(args, retriever="distilled"), similarity=similarity)
    stages = found_for(args)
    read = f"distilled: {len(SENTENCES)} passages read, correlation"
    assert caplog.text.count(read) == 1
    for split in ("train", "test"):
        first, second = stages.candidates[split].candidates, stages.evidence[split].candidates
        assert (np.diff(first.scores, axis=1) <= 0).all()
        np.testing.assert_array_equal(np.sort(first.rows), np.sort(second.rows))
    caplog.clear()
    again = found_for(with_retriever(args, num_candidates=4), ("test",))
    assert read not in caplog.text
    assert "0 LM forwards" in caplog.text
    np.testing.assert_array_equal(again.candidates["test"].candidates.rows, first.rows[:, :4])
    plain = found_for(with_retriever(args, retriever="dense"), ("test",))
    assert (plain.candidates["test"].candidates.rows != first.rows).any()  # control


def test_removed_passages_are_not_found(args):
    whole = Stages.read(with_retriever(args, retriever="distilled"), ALONE)
    queries = whole.data.test
    before = whole.retriever.for_examples(queries, 3)
    (folder,) = (args.artifacts / "indexes").iterdir()
    gone = sorted(set(before.rows[0].tolist()))
    assert main(["index", "remove", "--index_dir", str(folder), "--rows", *map(str, gone)]) == 0
    named = with_retriever(args, retriever="distilled", index_dir=str(folder))
    found = Stages.read(named, ALONE).retriever.for_examples(queries, 3)
    assert not set(gone) & set(found.rows.ravel().tolist())
    assert (found.rows >= 0).all()


def test_without_a_second_stage_under_one_prompt_it_is_refused(args, tmp_path, encoder_dir):
    with pytest.raises(ConfigError, match="learns from a task's second stage: use it with pgra"):
        World(tmp_path, encoder_dir).open("distilled")
    args = with_rerank(with_retriever(args, retriever="distilled"), num_prefixes=2)
    with pytest.raises(ConfigError, match="under one prompt: use --reranker prompted"):
        found_for(args)
