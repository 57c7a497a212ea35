"""A prompt, training examples, queries and candidates, for the tests of rerankers."""

from functools import cache

import numpy as np
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from pgra.context import Context
from pgra.exemplars.selector import build_prompt
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptTemplate
from pgra.rerank import open_reranker
from pgra.rerank.arguments import FitData, RerankArguments
from pgra.rerank.base import RerankRequest
from pgra.rerank.states import BankedReranker
from pgra.types import Candidates, Example

TEMPLATE = PromptTemplate("Does the following sentence have a sentiment?\n{text}")
WORDS = {"negative": "negative", "positive": "positive"}
TRAIN = [
    Example(f"train-{i}", {"text": f"A {'great' if i % 2 else 'dull'} film number {i}."}, label)
    for i, label in enumerate(["negative", "positive"] * 6)
]
TWO = [Example(f"test-{i}", {"text": text}) for i, text in enumerate(["A warm film.", "Dull!"])]
QUERIES = [*TWO, TRAIN[3]]
ROWS = np.array([[3, 0, 7, 11], [2, 5, 0, -1], [1, 0, 9, 4]])


@cache
def open_lm(lm, dtype="float32"):
    """Open an LM's folder once for all tests of a file."""
    return CausalLM(lm, device="cpu", dtype=dtype)


def over_corpus(
    lm, corpus, root, *, template=TEMPLATE, shots=4, seed=0, reference=None, dtype="float32", **how
):
    """Open a reranker of an LM's folder on a corpus; `how` are its arguments."""
    prompt = build_prompt(template, TRAIN, WORDS, num_exemplars=shots, seed=seed)
    args = RerankArguments(**{"bank_shard_rows": 5, "similarity": "dot", **how})
    request = RerankRequest(
        args=args,
        prompt=prompt,
        corpus=corpus,
        context=Context(artifacts=root),
        fit_data=reference or FitData(),
    )
    encoder = PromptedEncoder(open_lm(str(lm), dtype), prompt)
    return BankedReranker(request, encoder)


def of_pairs(name, options, corpus, root, device="cpu", **changes):
    """Open a reranker that reads query and passage together; `changes` are its other arguments."""
    changes = {"bank_shard_rows": 2, "lm_dtype": "float32", **changes}
    return open_reranker(
        RerankRequest(
            args=RerankArguments(reranker=name, **changes),
            prompt=FewShotPrompt(PromptTemplate("{text}")),
            corpus=corpus,
            context=Context(artifacts=root, device=device),
            options=options,
        )
    )


def run(reranker, queries=QUERIES, rows=ROWS):
    """Rerank candidates without scores; give what was found and what was done for it."""
    work = reranker.prepare(queries, rows)
    return reranker.rerank(queries, Candidates(rows, np.zeros(rows.shape, np.float32))), work


@cache
def plain_lm(lm_dir, *, with_head=False):
    kind = AutoModelForCausalLM if with_head else AutoModel
    return kind.from_pretrained(lm_dir).eval(), AutoTokenizer.from_pretrained(lm_dir)
