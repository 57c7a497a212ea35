"""`--system icl`: the frozen LM decides, by the chances of the label words after its prompt.

Guo et al. 2023, section 3.1, baseline 1: the reranker's LM, template and exemplars ("the same
templates as ours in the second stage", 8 shots); "generate answers" is here the likeliest label
word, all its tokens counted, so that every query gets a label.

With `--exemplars knn` it is KATE (Liu et al. 2022): each query stands behind its own nearest
training examples. Prefixes are then read with every query.
"""

import logging
from collections.abc import Mapping
from functools import partial

from pgra.config import PgraArguments
from pgra.icl.scoring import read_queries, score_words
from pgra.models.answer_words import AnswerWords
from pgra.models.loading import batch_budget
from pgra.models.prefix import PromptedEncoder
from pgra.pipelines.exemplars import neighbor_model
from pgra.pipelines.found import Found, timed
from pgra.pipelines.pgra import read_task
from pgra.pipelines.run import Outcome
from pgra.pipelines.untrained import Decisions, run_untrained
from pgra.processes import Processes
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.predict import decide
from pgra.rerank import bank_name, open_prompted_encoder
from pgra.rerank.prompted import open_query_bank
from pgra.types import Json

logger = logging.getLogger(__name__)

_SEED_NOTE = (
    "the seed decides nothing here: the LM is frozen; other exemplars are --exemplar_seed's"
)
_KATE_NOTE = "the seed decides nothing here: the LM is frozen, and each query's exemplars are given"


def run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> Outcome:
    """Decide the test examples by in-context learning, or take up what is there.

    Args:
        args: Task, LM and exemplars; `length_normalize` divides a word's log-probability by its
            tokens.
        training: Its `output_dir` is the run.
        processes: Who shares the reading.

    Raises:
        ArtifactError: If the folder holds another run.
        PgraError: As `read_task`, `open_prompted_encoder` and `AnswerWords.of`.
    """
    found = read_task(args)
    encoder = open_prompted_encoder(
        args.rerank, found.prompt, device=args.runtime.device, with_head=True
    )
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
        lambda: _decide(args, found, encoder, words, processes=processes),
        settings=settings,
        models=[args.rerank.lm, *([] if found.exemplars is None else [neighbor_model(args)])],
        processes=processes,
    )


def _decide(
    args: PgraArguments,
    found: Found,
    encoder: PromptedEncoder,
    words: AnswerWords,
    *,
    processes: Processes,
) -> Decisions:
    examples, exemplars = found.examples("test"), found.exemplars
    made_of = {} if exemplars is None else exemplars.fingerprint
    bank = open_query_bank(encoder, args.artifacts, bank_name(args.rerank), made_of)
    tokenize = None if exemplars is None else partial(exemplars.tokenize, encoder)
    with timed(found, "states"):
        if exemplars is not None:
            exemplars.look_up(examples, processes)
        num_read = read_queries(
            encoder,
            bank,
            examples,
            words,
            shard_rows=batch_budget(args.rerank.bank_shard_rows, encoder.lm.device),
            tokenize=tokenize,
            processes=processes,
            progress=processes.worker.is_main,
        )
    if exemplars is not None:
        exemplars.tell_shortened()
    logger.info("icl: %d LM forwards for %d queries", num_read, len(examples))
    normalize = args.reader.length_normalize
    with timed(found, "evaluation"):
        scores = score_words(encoder, bank, examples, words, length_normalize=normalize)
    verbalizer = Verbalizer(found.task.prompt_words, template="")
    ids = [example.id for example in examples]
    note = _SEED_NOTE if exemplars is None else _KATE_NOTE
    return Decisions(decide(ids, scores, verbalizer), [note])
