"""One LM under several draws of exemplars."""

import numpy as np
import pytest
from conftest import with_rerank, with_retriever

from pgra.core import ALONE
from pgra.errors import ConfigError
from pgra.methods.stages import Stages


def evidence(args):
    found = Stages.read(args, ALONE)
    found.find(["test"])
    return found, found.evidence["test"].candidates


def by_row(candidates):
    order = np.argsort(candidates.rows, axis=1)
    return np.take_along_axis(candidates.scores, order, 1)


def test_scores_are_the_mean_over_the_prefixes(args):
    """The same training examples are left out, so that only the prefix differs."""
    args = with_retriever(args, retriever="random")
    found, both = evidence(with_rerank(args, num_prefixes=2))
    prompt = found.prompt
    assert prompt.exemplar_ids != prompt.others[0].exemplar_ids
    assert not prompt.shown_ids & {example.id for example in found.data.train}
    alone = []
    for seed in (0, 1):
        one, scored = evidence(with_rerank(args, exemplar_seed=seed))
        assert one.prompt.prefix == (prompt, *prompt.others)[seed].prefix
        alone.append(by_row(scored))
    means = np.mean(alone, axis=0)
    np.testing.assert_allclose(by_row(both), means, rtol=1e-5)
    assert np.abs(by_row(both) - alone[0]).max() > 1e-3
    assert (np.diff(both.scores, axis=1) <= 0).all()


def test_prefixes_that_cannot_differ_are_refused(args):
    with pytest.raises(ConfigError, match="several draws need exemplars that are drawn"):
        with_rerank(args, num_prefixes=2, exemplars="knn")
