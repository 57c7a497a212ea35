"""The public classes in eight threads at once; a memory in `test_memory`."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import SENTENCES

import pgra

POOL = [(text, str(i % 2)) for i, text in enumerate(SENTENCES)]
QUERIES = [f"{SENTENCES[i % 12]} {i}" for i in range(32)]
TEXTS = [["Good!" * j + str(i) for j in range(i % 3, 5)] for i in range(32)]


@pytest.mark.slow
def test_each_call_gets_its_own_answer(lm_dirs, encoder_dir, cross_encoder_dir, tmp_path):

    lm, pairs = lm_dirs["llama"], str(cross_encoder_dir)
    causal = shutil.copytree(lm, tmp_path / "mxbai-rerank")  # by whose template it is asked
    likely = pgra.Reranker(str(lm), by="likelihood")
    classifier = pgra.Classifier(str(lm), POOL, num_exemplars=0, encoder="none")
    encoder = pgra.Encoder(str(encoder_dir))
    selector = pgra.ExemplarSelector(POOL, encoder=encoder)
    index = pgra.Index.build(SENTENCES, encoder=encoder)
    asked = {
        "states": pgra.Reranker(str(lm), template="{text}").score,
        "likelihood": likely.score,
        "causal": pgra.Reranker(str(causal), by="causal").score,
        "cross-encoder": pgra.Reranker(pairs, by="cross-encoder").score,
        "Classifier": lambda _, texts: classifier.predict_proba(texts),
        "Encoder": lambda _, texts: encoder.encode(texts),
        "Index": lambda query, _: [hit.score for hit in index.search(query, 3)],
        "ExemplarSelector": lambda query, _: list(map(POOL.index, selector.select(query, 9))),
    }
    with ThreadPoolExecutor(8) as pool:
        for name, ask in asked.items():
            answers = list(pool.map(ask, QUERIES, TEXTS))  # the first calls load the model
            for answer, *case in zip(answers, QUERIES, TEXTS, strict=True):
                np.testing.assert_allclose(answer, ask(*case), 1e-3, 1e-5, err_msg=name)
            assert not np.array_equal(answers[0], answers[3])  # the control: they differ
