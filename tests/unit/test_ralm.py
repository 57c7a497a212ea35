"""The decoder-only reader: what it reads. That words are scored as stock: `test_generate`."""

import pytest

from pgra.errors import DataError
from pgra.lm.causal_lm import CausalLM
from pgra.methods.kate import count_word_tokens
from pgra.methods.ralm import write_prompts
from pgra.prompts import PromptTemplate
from pgra.types import Example

WORDS = {"negative": "bad", "positive": "very good"}  # of one token and of several
TEMPLATE = PromptTemplate("{text}\nThe answer is", "")
QUERIES = [
    Example("a", {"text": "A warm and funny film."}, "positive"),
    Example("b", {"text": "A dull story that wastes its actors and the sea."}, "negative"),
    Example("c", {"text": "Red"}, "positive"),
]
EVIDENCE = [["The sea is blue.", "Critics praised it."], [], ["A dull, lifeless story. " * 4]]


def prompts_of(lm_dir, queries, evidence, max_tokens=200):
    """Write prompts; also return the LM."""
    lm = CausalLM(str(lm_dir), dtype="float32", device="cpu")
    asked = [TEMPLATE.render_query(query.fields, after_prefix=False) for query in queries]
    names = [query.id for query in queries]
    room = {"max_tokens": max_tokens, "num_new_tokens": count_word_tokens(lm, WORDS)}
    return write_prompts(lm, names, asked, evidence, **room), lm


def test_evidence_stands_before_the_query_the_best_next_to_it(lm_dirs):
    prompts, _ = prompts_of(lm_dirs["gpt2"], QUERIES, EVIDENCE)
    expected = "Critics praised it.\n\nThe sea is blue.\n\nA warm and funny film."
    assert prompts[0] == f"{expected}\nThe answer is"
    assert prompts[1] == f"{QUERIES[1].text}\nThe answer is"  # without evidence the plain LM


def test_the_worst_evidence_is_cut_first_and_the_query_never(lm_dirs):
    query, best, worst = QUERIES[0], "The sea is blue.", "Critics praised the acting of it all."
    whole, lm = prompts_of(lm_dirs["gpt2"], [query], [[best, worst]])
    count = lm.count_tokens
    full, bare = count(whole)[0], count(prompts_of(lm_dirs["gpt2"], [query], [[]])[0])[0]
    answer = max(count([f" {word}" for word in WORDS.values()]))
    seen = set()
    for room in range(full, bare + 8, -2):
        (text,), _ = prompts_of(lm_dirs["gpt2"], [query], [[best, worst]], room + answer)
        assert count([text])[0] <= room
        assert text.endswith(f"{query.text}\nThe answer is")
        assert (best in text) or worst.split()[0] not in text
        seen.add(text)
    assert len(seen) > 2
    with pytest.raises(DataError, match="query a"):
        prompts_of(lm_dirs["gpt2"], [query], [[best]], bare)
