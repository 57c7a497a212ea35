"""The reranker against equations 1 to 3 of the paper, written down plainly."""

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from small_reranking import TWO, over_corpus, plain_lm, run

from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.prompts import PromptTemplate

CANDIDATES = [[3, 0, 3, -1, 1], [2, 5, 0, 7, 10]]  # a passage twice, one missing


@pytest.fixture
def open_one(lm_dirs, corpus, tmp_path):
    """Open a reranker: by default of the OPT, on the corpus, with four exemplars."""

    def open_one(lm="opt", where=corpus, **how):
        return over_corpus(lm_dirs[lm], where, tmp_path, **how)

    return open_one


@pytest.fixture
def rerank(open_one):
    def rerank(lm="opt", rows=CANDIDATES, **how):
        reranker = open_one(lm, **how)
        return *run(reranker, TWO, np.array(rows)), reranker.encoder.prompt

    return rerank


@pytest.mark.parametrize(("similarity", "lm"), [("dot", "gpt2"), ("cosine", "opt-350m")])
def test_scores_are_those_of_the_papers_equations(rerank, lm_dirs, similarity, lm, monkeypatch):
    ours, work, prompt = rerank(lm, similarity=similarity)
    assert work.num_new == 7 + 2
    model, tokenizer = plain_lm(lm_dirs[lm])

    @torch.no_grad()
    def state(text):
        body = f"Does the following sentence have a sentiment?\n{text}\nThe answer is"
        ids = tokenizer(f"{prompt.prefix}\n\n{body}", return_tensors="pt")["input_ids"]
        last = model(input_ids=ids).last_hidden_state[0, -1]
        return last / last.norm() if similarity == "cosine" else last

    for line, query in enumerate(TWO):
        rows = [row for row in CANDIDATES[line] if row >= 0]
        truth = {row: float(state(query.text) @ state(SENTENCES[row])) for row in rows}
        order = sorted(rows, key=lambda row: (-truth[row], row))
        assert ours.rows[line].tolist() == [*order, *[-1] * (5 - len(order))]
        truths = [truth[row] for row in order]
        np.testing.assert_allclose(ours.scores[line, : len(order)], truths, rtol=1e-4)
    for name in ("_CHUNK_BYTES", "_BLOCK_BYTES", "_PAIR_BYTES"):
        monkeypatch.setattr(f"pgra.rerank.similarity.{name}", 1)  # one at a time
    parts, work, _ = rerank(lm, similarity=similarity)
    np.testing.assert_array_equal(parts.scores, ours.scores)
    assert work.num_new == 0


def test_whatever_changes_states_names_another_bank(open_one, tmp_path):
    changed = tmp_path / "changed.txt"
    changed.write_text("\n".join([*SENTENCES[:-1], "Another last line."]) + "\n")
    banks = [
        open_one(**how).bank
        for how in (
            {},
            {"lm": "gpt2"},
            {"seed": 1},
            {"shots": 0},
            {"shots": 0, "template": PromptTemplate("Is this good?\n{text}")},
            {"dtype": "float16"},
            {"where": open_corpus(CorpusArguments(corpus=str(changed)), tmp_path / "artifacts")},
        )
    ]
    assert len({bank.folder for bank in banks}) == len(banks)
