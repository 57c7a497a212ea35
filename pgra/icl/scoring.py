"""In-context learning: a frozen LM decides by the chances it gives to the label words.

Brown et al. 2020, section 2.4: each candidate answer is scored by the LM's likelihood of its
tokens after the prompt. Guo et al. 2023 have it as a baseline ("ICL", section 3.1, with the
reranker's LM, prompt and 8 exemplars).

After a query's prompt stands the very state that the reranker compares, h*(q). So words of one
token cost no forward where the queries are in the bank; a longer word costs one more forward a
query for each of its beginnings.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pgra.models.answer_words import AnswerWords
from pgra.models.lm_head import LMHead
from pgra.models.prefix import PromptedEncoder, Prompts
from pgra.processes import Processes
from pgra.rerank.bank import Bank
from pgra.rerank.prompted import fill_queries, query_key
from pgra.types import Example, Scores

_STATES = 1 << 10  # read from the bank at a time


def score_words(
    encoder: PromptedEncoder,
    bank: Bank,
    examples: Sequence[Example],
    words: AnswerWords,
    *,
    length_normalize: bool = False,
) -> Scores:
    """Score each label's word after each query's prompt; `read_queries` must have seen them.

    Args:
        encoder: LM, with its head, and prompt.
        bank: Its states of queries.
        examples: B queries.
        words: C labels' words.
        length_normalize: Whether a word's log-probability is divided by its tokens.

    Returns:
        (B, C): the log-probability of all of a word's tokens, in the order of labels.

    Raises:
        KeyError: If a state is missing.
        ModelError: If the LM's words cannot be scored.
    """
    head, labels = LMHead.of(encoder.lm), list(words.tokens)
    scores = np.zeros((len(examples), len(labels)), dtype=np.float32)
    for beginning in words.beginnings:
        nexts = words.nexts(beginning)
        columns = [labels.index(label) for label in nexts]
        keys = np.array([query_key(example, beginning) for example in examples], np.int64)
        for start in range(0, len(keys), _STATES):
            part = slice(start, start + _STATES)
            states = torch.from_numpy(bank.states(keys[part]))
            scores[part, columns] += head.log_chances(states, list(nexts.values())).numpy()
    if length_normalize:
        scores /= np.array([len(ids) for ids in words.tokens.values()], dtype=np.float32)
    return scores


def read_queries(
    encoder: PromptedEncoder,
    bank: Bank,
    examples: Sequence[Example],
    words: AnswerWords,
    *,
    shard_rows: int,
    tokenize: Callable[[Sequence[Example]], Prompts] | None = None,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
    progress: bool = False,
) -> int:
    """Let the LM read queries, and queries with the beginning of an answer, once each.

    Args:
        encoder: LM and prompt.
        bank: Its states of queries, as `open_query_bank` gives it.
        examples: The queries.
        words: What may be answered.
        shard_rows: Texts in one shard of the bank.
        tokenize: Writes the queries' prompts; None has the encoder's prefix before each.
        processes: Who shares the work.
        progress: Whether to show bars.

    Returns:
        How many texts were read: 0 where all states were in the bank.
    """
    return sum(
        fill_queries(
            bank,
            encoder,
            examples,
            shard_rows=shard_rows,
            written=beginning,
            tokenize=tokenize,
            processes=processes,
            progress=progress,
        )
        for beginning in words.beginnings
    )
