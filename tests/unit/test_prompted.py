"""The reranker against equations 1 to 3 of the paper, written down plainly."""

from functools import cache

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from transformers import AutoModel, AutoTokenizer

from pgra.config import CorpusArguments, RerankArguments
from pgra.core import Candidates, Context, Example
from pgra.data.corpus import open_corpus
from pgra.errors import ArtifactError
from pgra.exemplars.prompt import build_prompt
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.template import PromptTemplate
from pgra.rerank.bank import Bank
from pgra.rerank.prompted import PromptedReranker

TEMPLATE = PromptTemplate("Does the following sentence have a sentiment?\n{text}")
WORDS = {"negative": "negative", "positive": "positive"}
TRAIN = [
    Example(f"train-{i}", {"text": f"A {'great' if i % 2 else 'dull'} film number {i}."}, label)
    for i, label in enumerate(["negative", "positive"] * 6)
]
QUERIES = [Example(f"test-{i}", {"text": text}) for i, text in enumerate(["A warm film.", "Dull!"])]


@pytest.fixture
def corpus(corpus_file, tmp_path):
    return open_corpus(CorpusArguments(corpus=str(corpus_file)), tmp_path / "artifacts")


def open_one(
    lm_dir, corpus, artifacts, *, template=TEMPLATE, shots=4, seed=0, dtype="float32", **kwargs
):
    prompt = build_prompt(template, TRAIN, WORDS, num_exemplars=shots, seed=seed)
    encoder = PromptedEncoder(CausalLM.from_name(str(lm_dir), dtype=dtype), prompt)
    args = RerankArguments(bank_shard_rows=5, **kwargs)
    return PromptedReranker(encoder, corpus, Context(artifacts=artifacts), args)


def rerank(lm_dir, corpus, artifacts, candidates, **kwargs):
    reranker = open_one(lm_dir, corpus, artifacts, **kwargs)
    work = reranker.prepare(QUERIES, candidates.rows)
    return reranker.rerank(QUERIES, candidates), work, reranker.encoder.prompt


def candidates_of(rows):
    rows = np.array(rows, dtype=np.int64)
    return Candidates(rows, np.zeros(rows.shape, np.float32))


CANDIDATES = [[3, 0, 7, 11, 1], [2, 5, 0, 1, 10]]


@cache
def plain_lm(lm_dir):
    return AutoModel.from_pretrained(lm_dir).eval(), AutoTokenizer.from_pretrained(lm_dir)


@cache
def state_by_hand(lm_dir, whole_prompt):
    model, tokenizer = plain_lm(lm_dir)
    ids = tokenizer(whole_prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids).last_hidden_state[0, -1]


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_scores_are_those_of_the_papers_equations(lm_dir, corpus, tmp_path, similarity):
    ours, _, prompt = rerank(
        lm_dir, corpus, tmp_path, candidates_of(CANDIDATES), similarity=similarity
    )

    def state(text):
        body = f"Does the following sentence have a sentiment?\n{text}\nThe answer is"
        last = state_by_hand(lm_dir, f"{prompt.prefix}\n\n{body}")
        return last / last.norm() if similarity == "cosine" else last

    for line, query in enumerate(QUERIES):
        truth = {row: float(state(query.text) @ state(SENTENCES[row])) for row in CANDIDATES[line]}
        order = sorted(truth, key=lambda row: (-truth[row], row))
        assert ours.rows[line].tolist() == order
        np.testing.assert_allclose(ours.scores[line], [truth[row] for row in order], rtol=1e-4)


def test_a_second_run_reads_nothing_and_never_loads_the_lm(lm_dirs, corpus, tmp_path, monkeypatch):
    first, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates_of(CANDIDATES))
    assert (work.num_passages, work.num_new) == (8, 8 + 2)
    assert work.num_tokens > 0

    def refuse(*_args, **_kwargs):
        raise AssertionError("the LM was loaded")

    monkeypatch.setattr(AutoModel, "from_pretrained", refuse)
    second, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates_of(CANDIDATES))
    assert (work.num_new, work.num_tokens) == (0, 0)
    np.testing.assert_array_equal(second.scores, first.scores)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_sizes_of_blocks_change_no_score(lm_dirs, corpus, tmp_path, monkeypatch, similarity):
    candidates = candidates_of([[3, 0, 3, -1, 1], [2, 5, 0, 1, 10]])  # a passage twice, one missing
    whole, _, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates, similarity=similarity)
    for name in ("_QUERY_BYTES", "_NUM_PAIRS", "_BLOCK_BYTES", "_PAIR_BYTES"):
        monkeypatch.setattr(f"pgra.rerank.similarity.{name}", 1)  # one at a time
    parts, _, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates, similarity=similarity)
    np.testing.assert_array_equal(parts.rows, whole.rows)
    np.testing.assert_array_equal(parts.scores, whole.scores)
    assert whole.rows[0, -1] == -1
    assert np.isfinite(whole.scores[1]).all()


def test_a_full_bank_serves_any_candidates(lm_dirs, corpus, tmp_path):
    few, others = candidates_of(CANDIDATES), candidates_of([[4, 6, 8], [9, 4, 6]])
    _, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path / "full", few, bank="full")
    assert (work.num_passages, work.num_new) == (len(SENTENCES), len(SENTENCES) + 2)
    found, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path / "full", others, bank="full")
    assert work.num_new == 0
    rerank(lm_dirs["opt"], corpus, tmp_path / "lazy", few)
    same, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path / "lazy", others)
    assert work.num_new == 4  # control: 4, 6, 8 and 9 were no candidates
    np.testing.assert_array_equal(found.rows, same.rows)
    np.testing.assert_allclose(found.scores, same.scores, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bank_dtype", ["auto", "float16", "int8"])
def test_a_smaller_dtype_ranks_nearly_alike_from_a_bank_of_its_own(
    lm_dirs, corpus, tmp_path, dtype, bank_dtype
):
    candidates = candidates_of(CANDIDATES)
    whole, _, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates)
    how = {"dtype": dtype, "bank_dtype": bank_dtype}
    small, work, _ = rerank(lm_dirs["opt"], corpus, tmp_path, candidates, **how)
    is_same = how == {"dtype": "float32", "bank_dtype": "auto"}
    # Passages anew, and queries only for another LM: they stay as they come.
    assert work.num_new == (0 if is_same else 8 + 2 * (dtype == "bfloat16"))
    assert sorted(small.rows.ravel()) == sorted(whole.rows.ravel())
    off = np.abs(np.sort(small.scores) - np.sort(whole.scores)).max()
    assert (off == 0) == is_same
    assert off < 0.03 * np.abs(whole.scores).max()


def test_a_bank_kept_in_the_lms_dtype_is_the_same_bank(lm_dirs, corpus, tmp_path):
    folders = [
        open_one(lm_dirs["opt"], corpus, tmp_path, dtype=dtype, bank_dtype=bank_dtype).bank.folder
        for dtype in ("float16", "bfloat16")
        for bank_dtype in ("auto", "float16")
    ]
    assert folders[0] == folders[1]
    assert folders[2] != folders[3]


OTHERS = {
    "model": {"lm_dir": "gpt2"},
    "prefix": {"seed": 1},
    "template": {"template": PromptTemplate("Is this good?\n{text}")},
    "dtype": {"dtype": "bfloat16"},
    "bank_dtype": {"bank_dtype": "int8"},
}


@pytest.mark.parametrize("field", [*OTHERS, "corpus_sha256"])
def test_a_bank_of_another_kind_is_refused_by_name(lm_dirs, corpus, tmp_path, field):
    shots = 0 if field == "template" else 4  # the exemplars of a prefix show the template too

    def of(where, lm_dir="opt", **kwargs):
        return open_one(lm_dirs[lm_dir], where, tmp_path, shots=shots, **kwargs).bank

    own = of(corpus)
    own.fill([0, 1], lambda keys: keys, lambda keys, _: torch.ones(len(keys), 3), shard_rows=2)
    if field == "corpus_sha256":
        changed = tmp_path / "changed.txt"
        changed.write_text("\n".join([*SENTENCES[:-1], "Another last line."]) + "\n")
        other = of(open_corpus(CorpusArguments(corpus=str(changed)), tmp_path / "artifacts"))
    else:
        other = of(corpus, **OTHERS[field])
    assert other.folder != own.folder  # so nobody meets it but who copies or renames folders
    Bank(own.folder, own.fingerprint)  # control
    with pytest.raises(ArtifactError, match=f"was made with {field} .*, this run asks for"):
        Bank(own.folder, other.fingerprint)
