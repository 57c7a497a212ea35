"""PGRA whole (Guo et al. 2023, section 2): candidates, evidence, reader.

    candidates = retriever(query)            k passages of a static index       (eq. 1)
    states     = LM(prefix + P(text))        of the query and each candidate    (eq. 2)
    evidence   = top d by state product                                         (eq. 3)
    label      = reader(query, evidence)     Fusion-in-Decoder

With `--retriever exhaustive` there is no first stage: all passages have states, and evidence is the
top d of the whole corpus. Each stage's product lies under the artefacts folder by fingerprint and
is made once.
"""

import logging
from collections.abc import Sequence

import numpy as np

from pgra.config import PgraArguments
from pgra.data.corpus import open_corpus
from pgra.data.splits import Splits, load_splits
from pgra.data.tasks import Task, load_task
from pgra.errors import ConfigError
from pgra.io import digest
from pgra.pipelines.exemplars import write_task_prompt
from pgra.pipelines.found import SPLITS, Found, timed
from pgra.processes import Processes
from pgra.prompts.template import PromptTemplate
from pgra.rerank import Reranker, Work, open_reranker
from pgra.rerank.exhaustive import ExhaustiveSearch, num_kept, open_exhaustive
from pgra.retrieval import Retriever, open_retriever
from pgra.retrieval.base import check_num_candidates
from pgra.retrieval.store import candidates_fields, examples_digest, store_candidates
from pgra.types import MISSING_ROW

logger = logging.getLogger(__name__)


def read_task(args: PgraArguments) -> Found:
    """Read a task's data and write its prompt.

    Raises:
        ConfigError: If no task is named, or there are too few examples for the prompt.
        DataError: If the data cannot be read.
    """
    if args.data.task is None:
        raise ConfigError("--task is missing: name one (pgra data lists them), or give a YAML")
    task = load_task(args.data.task)
    splits = load_splits(task, args.data)
    prompt, exemplars = write_task_prompt(prompt_template(task), task, splits, args)
    shown = prompt.shown_ids
    # Systems without a prompt leave the same examples out, so that all train on equal data.
    train = [example for example in splits.train if example.id not in shown]
    if not train:
        raise ConfigError(
            f"all {len(splits.train)} training examples stand in the prompt: "
            "lower --num_exemplars, or give more examples"
        )
    splits = Splits(train, splits.dev, splits.test, splits.notes)
    found = Found(task, splits, prompt, exemplars, depth=args.rerank.num_evidence)
    for split in SPLITS:
        found.fingerprints[split] = digest(
            [examples_digest(found.examples(split)), [e.label for e in found.examples(split)]]
        )
    return found


def find_evidence(
    found: Found,
    args: PgraArguments,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
    *,
    splits: Sequence[str] = SPLITS,
) -> None:
    """Run both stages (or the search without a first one), or take up what is there.

    Args:
        found: The task's examples and prompt; candidates and evidence are added to it.
        args: What to do.
        processes: Who shares the work.
        splits: Which splits get evidence.

    Raises:
        PgraError: As each stage says.
    """
    open_stages(found, args)
    if found.corpus is None or found.reranker is None:
        return
    if args.is_exhaustive:
        _find_in_all(found, found.reranker, args, processes, splits)
        return
    with timed(found, "index"):
        retriever = open_retriever(
            args.retriever,
            found.corpus,
            args.artifacts,
            device=args.runtime.device,
            processes=processes,
            progress=processes.worker.is_main,
        )
    found.fingerprints["index"] = dict(retriever.fingerprint)
    with timed(found, "candidates"):
        _retrieve(found, retriever, args, processes, splits)
    del retriever  # the LM may need the memory of index and encoder
    with timed(found, "states"):
        _read(found, found.reranker, processes, splits)
    with timed(found, "evidence"):
        _rerank(found, found.reranker, args, processes, splits)


def open_stages(found: Found, args: PgraArguments) -> None:
    """Open what is quick to open, so that what can be refused is refused before the long stages.

    Adds the corpus, the reranker (with its prompt checked against the LM's window; the weights are
    not loaded yet) and their fingerprints to `found`; a second call does nothing.

    Raises:
        PgraError: As `open_corpus` and `open_reranker`; also if k (with the exhaustive search: d)
            exceeds the corpus.
    """
    if args.rerank.num_evidence == 0 or found.corpus is not None:
        return
    with timed(found, "corpus"):
        found.corpus = open_corpus(args.corpus, args.artifacts)
    if args.is_exhaustive:
        check_num_evidence(args.rerank.num_evidence, len(found.corpus))
    else:
        check_num_candidates(args.retriever.num_candidates, len(found.corpus))
    found.reranker = open_reranker(
        args.rerank,
        found.prompt,
        found.corpus,
        args.artifacts,
        exemplars=found.exemplars,
        device=args.runtime.device,
        reference=found.reference,
    )
    found.fingerprints["corpus"] = found.corpus.fingerprint["corpus_sha256"]
    found.fingerprints["reranker"] = dict(found.reranker.fingerprint)


def check_num_evidence(num_evidence: int, num_passages: int) -> None:
    """Refuse to look for more evidence than there are passages.

    Raises:
        ConfigError: If d exceeds the corpus, with both numbers.
    """
    if num_evidence > num_passages:
        raise ConfigError(
            f"num_evidence ({num_evidence}) exceeds the corpus ({num_passages} passages): "
            "lower it, or search a larger corpus"
        )


def prompt_template(task: Task) -> PromptTemplate:
    """Give a task's template as the LM sees it."""
    return PromptTemplate(task.prompt, task.answer, task.inputs)


def _retrieve(
    found: Found,
    retriever: Retriever,
    args: PgraArguments,
    processes: Processes,
    splits: Sequence[str],
) -> None:
    k = args.retriever.num_candidates
    for split in splits:
        examples = found.examples(split)
        fields = candidates_fields(
            retriever.fingerprint, args.retriever.retriever, k, examples=examples
        )
        queries = [example.text for example in examples]
        found.candidates[split] = store_candidates(
            args.artifacts / "candidates" / found.task.name,
            split,
            fields,
            lambda queries=queries: retriever.retrieve(queries, k),  # type: ignore[misc]
            stage="candidates",
            processes=processes,
        )
        found.fingerprints[f"candidates/{split}"] = digest(fields)
    reused = all(found.candidates[split].reused for split in splits)
    logger.info(
        "%s: %d candidates for each of %d queries%s",
        args.retriever.retriever,
        k,
        sum(len(found.examples(split)) for split in splits),
        " (reused)" if reused else "",
    )


def _read(found: Found, reranker: Reranker, processes: Processes, splits: Sequence[str]) -> None:
    """Let the LM read the union of all splits' candidates, each passage once.

    Where each query has a prefix of its own, a passage is read once with each.
    """
    examples = [example for split in splits for example in found.examples(split)]
    rows = np.concatenate([found.candidates[split].candidates.rows for split in splits])
    work = reranker.prepare(examples, rows, processes=processes, progress=processes.worker.is_main)
    if work.num_passages:
        pairs = int((rows != MISSING_ROW).sum())
        logger.info("reranker: %d query-candidate pairs; %s", pairs, describe_work(work))


def describe_work(work: Work) -> str:
    """Word what the LM did: a text that it reads is one forward, whatever batch it is read in."""
    if not work.num_new:
        return "0 LM forwards: every state was there already (reused)"
    return (
        f"{work.num_new} LM forwards, one for each new text, in {work.seconds:.0f} s "
        f"({work.num_tokens} tokens here, {work.num_cut} texts cut)"
    )


def _rerank(
    found: Found,
    reranker: Reranker,
    args: PgraArguments,
    processes: Processes,
    splits: Sequence[str],
) -> None:
    for split in splits:
        first = found.candidates[split]
        fields = {**reranker.fingerprint, "candidates": digest(first.fingerprint)}
        examples = found.examples(split)
        found.evidence[split] = store_candidates(
            args.artifacts / "evidence" / found.task.name,
            split,
            fields,
            lambda examples=examples, first=first: reranker.rerank(  # type: ignore[misc]
                examples, first.candidates
            ),
            stage="evidence",
            processes=processes,
        )
        found.fingerprints[f"evidence/{split}"] = digest(fields)


def _find_in_all(
    found: Found,
    reranker: Reranker,
    args: PgraArguments,
    processes: Processes,
    splits: Sequence[str],
) -> None:
    """Find evidence among all passages; it stands in for the first stage's candidates too."""
    search = open_exhaustive(
        reranker,
        args.artifacts,
        factory=args.retriever.index_factory,
        memory_gb=args.retriever.index_memory_gb,
    )
    examples = [example for split in splits for example in found.examples(split)]
    with timed(found, "states"):
        progress = processes.worker.is_main
        work = search.prepare(examples, processes=processes, progress=progress)
        pairs = len(examples) * work.num_passages
        logger.info("exhaustive: %d query-passage pairs; %s", pairs, describe_work(work))
    with timed(found, "evidence"):
        for split in splits:
            _search(found, search, args, processes, split)
    reused = all(found.evidence[split].reused for split in splits)
    logger.info(
        "exhaustive: the best %d of %d passages for each of %d queries%s",
        args.rerank.num_evidence,
        work.num_passages,
        len(examples),
        " (reused)" if reused else "",
    )


def _search(
    found: Found, search: ExhaustiveSearch, args: PgraArguments, processes: Processes, split: str
) -> None:
    examples = found.examples(split)
    depth = num_kept(args.rerank.num_evidence, search.num_rows)
    fields = {
        **search.fingerprint,
        "num_kept": depth,
        "queries": examples_digest(examples),
    }
    found.evidence[split] = store_candidates(
        args.artifacts / "evidence" / found.task.name,
        split,
        fields,
        lambda: search.search(examples, depth),
        stage="evidence",
        processes=processes,
        measure=lambda best: {"recall": search.measure_recall(examples, best)},
    )
    found.candidates[split] = found.evidence[split]
    found.fingerprints[f"evidence/{split}"] = digest(fields)
