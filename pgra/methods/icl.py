"""`--system icl`: the frozen LM decides by the chances of the label words after its prompt.

Guo et al. 2023, section 3.1, baseline 1: the reranker's LM, template and exemplars ("the same
templates as ours in the second stage", 8 shots); "generate answers" is here the likeliest label
word, all its tokens counted, so that every query gets a label.

With `--exemplars knn` it is KATE (Liu et al. 2022): each query stands behind its own nearest
training examples. Prefixes are then read with every query.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from pgra.config import PgraArguments
from pgra.core import ALONE, Context, Example, Json, Scores
from pgra.lm.load import batch_budget
from pgra.lm.prefix import PromptedEncoder, Prompts
from pgra.lm.score import AnswerWords, LMHead
from pgra.methods.pgra import neighbor_model, read_task, stage_context
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.calibrate import decide
from pgra.rerank.bank import Bank, query_key
from pgra.rerank.states import bank_name, fill_queries, open_prompted_encoder, open_query_bank
from pgra.run_folder import Found, timed
from pgra.runs import Decisions, Outcome, run_untrained

# In-context learning: a frozen LM decides by the chances it gives to the label words.
#
# Brown et al. 2020, section 2.4: each candidate answer is scored by the LM's likelihood of its
# tokens after the prompt. Guo et al. 2023 have it as a baseline ("ICL", section 3.1, with the
# reranker's LM, prompt and 8 exemplars).
#
# After a query's prompt stands the very state that the reranker compares, h*(q). So words of one
# token cost no forward where the queries are in the bank; a longer word costs one more forward a
# query for each of its beginnings.


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
    context: Context = ALONE,
) -> int:
    """Let the LM read queries, and queries with the beginning of an answer, once each.

    Args:
        encoder: LM and prompt.
        bank: Its states of queries, as `open_query_bank` gives it.
        examples: The queries.
        words: What may be answered.
        shard_rows: Texts in one shard of the bank.
        tokenize: Writes the queries' prompts; None has the encoder's prefix before each.
        context: Who shares the work.

    Returns:
        How many texts were read: 0 where all states were in the bank.
    """
    return sum(
        fill_queries(
            bank,
            encoder,
            examples,
            context,
            shard_rows=shard_rows,
            written=beginning,
            tokenize=tokenize,
        )
        for beginning in words.beginnings
    )


logger = logging.getLogger(__name__)

_SEED_NOTE = (
    "the seed decides nothing here: the LM is frozen; other exemplars are --exemplar_seed's"
)
_KATE_NOTE = "the seed decides nothing here: the LM is frozen, and each query's exemplars are given"


def run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    context: Context = ALONE,
) -> Outcome:
    """Decide the test examples by in-context learning, or take up what is there.

    Args:
        args: Task, LM and exemplars; `length_normalize` divides a word's log-probability by its
            tokens.
        training: Its `output_dir` is the run.
        context: Who shares the reading.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As `read_task`, `open_prompted_encoder` and `AnswerWords.of`.
    """
    found = read_task(args)
    context = stage_context(args, context)
    encoder = open_prompted_encoder(args.rerank, found.prompt, context, with_head=True)
    words = AnswerWords.of(encoder, found.task.prompt_words)
    settings: Mapping[str, Json] = {
        "lm": dict(encoder.fingerprint),
        "words": {label: list(ids) for label, ids in words.tokens.items()},
        "length_normalize": args.reader.length_normalize,
        **({} if found.exemplars is None else found.exemplars.fingerprint),
    }
    return run_untrained(
        args,
        training,
        found,
        lambda: _decide(args, found, encoder, words, context=context),
        settings=settings,
        models=[args.rerank.lm, *([] if found.exemplars is None else [neighbor_model(args)])],
        context=context,
    )


def _decide(
    args: PgraArguments,
    found: Found,
    encoder: PromptedEncoder,
    words: AnswerWords,
    *,
    context: Context,
) -> Decisions:
    examples, exemplars = found.examples("test"), found.exemplars
    made_of = {} if exemplars is None else exemplars.fingerprint
    bank = open_query_bank(encoder, context, bank_name(args.rerank.lm), made_of)
    tokenize = None if exemplars is None else partial(exemplars.tokenize, encoder)
    with timed(found, "states"):
        if exemplars is not None:
            exemplars.look_up(examples, context)
        num_read = read_queries(
            encoder,
            bank,
            examples,
            words,
            shard_rows=batch_budget(args.rerank.bank_shard_rows, encoder.lm.device),
            tokenize=tokenize,
            context=context,
        )
    if exemplars is not None:
        exemplars.warn_shortened()
    logger.info("icl: %d LM forwards for %d queries", num_read, len(examples))
    normalize = args.reader.length_normalize
    with timed(found, "evaluation"):
        scores = score_words(encoder, bank, examples, words, length_normalize=normalize)
    verbalizer = Verbalizer(found.task.prompt_words, template="")
    ids = [example.id for example in examples]
    note = _SEED_NOTE if exemplars is None else _KATE_NOTE
    return Decisions(decide(ids, scores, verbalizer.labels), [note])
