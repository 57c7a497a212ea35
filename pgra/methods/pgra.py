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
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from pgra.artifacts import digest
from pgra.config import PgraArguments, ReaderArguments
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Json
from pgra.data.corpus import Corpus, open_corpus
from pgra.data.examples import Splits, load_splits
from pgra.data.tasks import Task, load_task
from pgra.errors import ConfigError
from pgra.exemplars.prompt import NearestExemplars, build_prompt
from pgra.lm.load import tokenizer_identity
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate, check_template
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import SegmentLayout, TokenizedInputs, build_inputs, store_inputs
from pgra.reader.predict import Decision
from pgra.rerank import Reference, Reranker, RerankRequest, Work, open_reranker
from pgra.rerank.exhaustive import ExhaustiveSearch, num_kept, open_exhaustive
from pgra.retrieval import Retriever, open_retriever
from pgra.retrieval.base import (
    candidates_fields,
    check_num_candidates,
    examples_digest,
    store_candidates,
)
from pgra.retrieval.neighbors import Neighbors, open_neighbor_encoder
from pgra.run_folder import SPLITS, Found, timed

# Which training examples stand in the LM's prompt: the same for all queries, or each its own.


def write_task_prompt(
    template: PromptTemplate, task: Task, splits: Splits, args: PgraArguments
) -> tuple[FewShotPrompt, NearestExemplars | None]:
    """Write the task's prompt; with exemplars "knn" a bare one, and what chooses each query's own.

    Raises:
        ConfigError: If there are too few training examples.
    """
    if args.rerank.exemplars == "knn":
        neighbors, count = open_neighbors(task, splits, args), args.rerank.num_exemplars
        exemplars = NearestExemplars(neighbors, template, task.prompt_words, count=count)
        return exemplars.prompt(()), exemplars
    prompt = build_prompt(
        template,
        splits.train,
        task.prompt_words,
        num_exemplars=args.rerank.num_exemplars,
        method=args.rerank.exemplars,
        seed=args.rerank.exemplar_seed,
        num_prefixes=args.rerank.num_prefixes,
    )
    return prompt, None


def open_neighbors(task: Task, splits: Splits, args: PgraArguments) -> Neighbors:
    """Give the training examples, to be searched; the encoder is loaded when it is first needed."""
    reader, device = args.reader.model_name_or_path, args.runtime.device
    return Neighbors(
        partial(open_neighbor_encoder, args.retriever, reader, device),
        splits.train,
        args.artifacts / "neighbors" / task.name,
    )


def neighbor_model(args: PgraArguments) -> str:
    """Name the model that examples are compared by, as the user wrote it."""
    if args.retriever.neighbor_encoder == "reader":
        return args.reader.model_name_or_path
    return args.retriever.encoder


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
    context: Context = ALONE,
    *,
    splits: Sequence[str] = SPLITS,
) -> None:
    """Run both stages (or the search without a first one), or take up what is there.

    Args:
        found: The task's examples and prompt; candidates and evidence are added to it.
        args: What to do.
        context: Who shares the work.
        splits: Which splits get evidence.

    Raises:
        PgraError: As each stage says.
    """
    open_stages(found, args, context)
    if found.corpus is None or found.reranker is None:
        return
    if args.is_exhaustive:
        _find_in_all(found, found.reranker, args, context, splits)
        return
    with timed(found, "index"):
        where = replace(context, artifacts=args.artifacts, device=args.runtime.device)
        retriever = open_retriever(args.retriever, found.corpus, where)
    found.fingerprints["index"] = dict(retriever.fingerprint)
    with timed(found, "candidates"):
        _retrieve(found, retriever, args, context, splits)
    del retriever  # the LM may need the memory of index and encoder
    with timed(found, "states"):
        _read(found, found.reranker, splits)
    with timed(found, "evidence"):
        _rerank(found, found.reranker, args, context, splits)


def stage_context(args: PgraArguments, context: Context) -> Context:
    """Return a job's context, with the device and the artifacts folder of its arguments."""
    return replace(context, artifacts=args.artifacts, device=args.runtime.device)


def open_stages(found: Found, args: PgraArguments, context: Context = ALONE) -> None:
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
        RerankRequest(
            args=args.rerank,
            prompt=found.prompt,
            corpus=found.corpus,
            context=stage_context(args, context),
            exemplars=found.exemplars,
            reference=found.reference,
        )
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
    context: Context,
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
            context=context,
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


def _read(found: Found, reranker: Reranker, splits: Sequence[str]) -> None:
    """Let the LM read the union of all splits' candidates, each passage once.

    Where each query has a prefix of its own, a passage is read once with each.
    """
    examples = [example for split in splits for example in found.examples(split)]
    rows = np.concatenate([found.candidates[split].candidates.rows for split in splits])
    work = reranker.prepare(examples, rows)
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
    context: Context,
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
            context=context,
        )
        found.fingerprints[f"evidence/{split}"] = digest(fields)


def _find_in_all(
    found: Found,
    reranker: Reranker,
    args: PgraArguments,
    context: Context,
    splits: Sequence[str],
) -> None:
    """Find evidence among all passages; it stands in for the first stage's candidates too."""
    search = open_exhaustive(
        reranker,
        factory=args.retriever.index_factory,
        memory_gb=args.retriever.index_memory_gb,
    )
    examples = [example for split in splits for example in found.examples(split)]
    with timed(found, "states"):
        work = search.prepare(examples)
        pairs = len(examples) * work.num_passages
        logger.info("exhaustive: %d query-passage pairs; %s", pairs, describe_work(work))
    with timed(found, "evidence"):
        for split in splits:
            _search(found, search, args, context, split)
    reused = all(found.evidence[split].reused for split in splits)
    logger.info(
        "exhaustive: the best %d of %d passages for each of %d queries%s",
        args.rerank.num_evidence,
        work.num_passages,
        len(examples),
        " (reused)" if reused else "",
    )


def _search(
    found: Found, search: ExhaustiveSearch, args: PgraArguments, context: Context, split: str
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
        context=context,
        measure=lambda best: {"recall": search.measure_recall(examples, best)},
    )
    found.candidates[split] = found.evidence[split]
    found.fingerprints[f"evidence/{split}"] = digest(fields)


# Both retrieval stages for queries as they come: opened once, no candidates are stored.


@dataclass(frozen=True)
class Ranked:
    """What the stages found for B queries.

    Attributes:
        first: The first stage's candidates, (B, K); where there is none, the same as `best`.
        best: The second stage's order of them, (B, K); of the exhaustive search, the best N.
    """

    first: Candidates
    best: Candidates


class EvidenceSearch:
    """Finds evidence for any query, with a task's prompt.

    The states of queries and of passages that the LM has not read yet are kept in the banks, as a
    run's are.

    Attributes:
        args: What to search, and how.
        corpus: What is searched.
        reranker: The second stage; its LM's weights are loaded when they are first needed.
    """

    def __init__(
        self,
        args: PgraArguments,
        prompt: FewShotPrompt,
        context: Context = ALONE,
        *,
        exemplars: NearestExemplars | None = None,
        reference: Reference = Reference(),  # noqa: B008 (frozen)
    ) -> None:
        """Open what is quick to open.

        Args:
            args: What to search, and how.
            prompt: The LM's.
            context: Who shares the work.
            exemplars: Each query's own, where the prompt has none.
            reference: What the task, or an earlier run, gives a similarity that is fitted.

        Raises:
            PgraError: As `open_corpus` and `open_reranker`.
        """
        self.args, self._context = args, context
        self.corpus: Corpus = open_corpus(args.corpus, args.artifacts)
        self.reranker: Reranker = open_reranker(
            RerankRequest(
                args=args.rerank,
                prompt=prompt,
                corpus=self.corpus,
                context=stage_context(args, context),
                exemplars=exemplars,
                reference=reference,
            )
        )

    @cached_property
    def retriever(self) -> Retriever:
        """Open the first stage; its index is built if it is not there."""
        where = replace(
            self._context, artifacts=self.args.artifacts, device=self.args.runtime.device
        )
        return open_retriever(self.args.retriever, self.corpus, where)

    @cached_property
    def exhaustive(self) -> ExhaustiveSearch:
        """Open the search without a first stage."""
        return open_exhaustive(
            self.reranker,
            factory=self.args.retriever.index_factory,
            memory_gb=self.args.retriever.index_memory_gb,
        )

    def find(self, queries: Sequence[Example], *, depth: int | None = None) -> Ranked:
        """Take queries through both stages, or through the search without a first one.

        Args:
            queries: Any; ids are not looked at.
            depth: Evidence a query of the exhaustive search; None is the run's d.

        Raises:
            PgraError: As each stage says.
        """
        if self.args.is_exhaustive:
            search = self.exhaustive
            wanted = self.args.rerank.num_evidence if depth is None else depth
            search.prepare(queries)
            best = search.search(queries, min(wanted, search.num_rows))
            return Ranked(best, best)
        texts = [query.text for query in queries]
        first = self.retriever.retrieve(texts, self.args.retriever.num_candidates)
        self.reranker.prepare(queries, first.rows)
        return Ranked(first, self.reranker.rerank(queries, first))


# What the reader reads of a task: its words, its segments, as tokens that are made once.


def reader_template(task: Task, args: ReaderArguments) -> str:
    """Give how the reader sees a query: as asked for, or by a profile, else as the task says.

    Raises:
        ConfigError: If what was asked for has other fields than the task (`--profile official` has
            one text, a pair has two); the task's own is named.
    """
    if not args.reader_template:
        return task.reader_template
    try:
        check_template(args.reader_template, task.inputs)
    except ConfigError as error:
        raise ConfigError(
            f"reader_template does not fit task '{task.name}': {str(error).rstrip('.')}; give the "
            f"task's own, which wins over a profile's: --reader_template '{task.reader_template}'"
        ) from None
    return args.reader_template


def task_verbalizer(task: Task, args: ReaderArguments) -> Verbalizer:
    """Give the reader's words and template for a task.

    Raises:
        ConfigError: If the template does not fit the task.
    """
    return Verbalizer(task.verbalizer, reader_template(task, args))


def segment_layout(task: Task, args: ReaderArguments) -> SegmentLayout:
    """Give how a task's segments are put together.

    Raises:
        ConfigError: If the template does not fit the task.
    """
    return SegmentLayout(reader_template(task, args), args.segment_order, args.max_segment_tokens)


def label_decision(args: ReaderArguments) -> Decision:
    """Give how labels are decided."""
    return Decision(args.decode, args.length_normalize)


def read_inputs(
    found: Found,
    split: str,
    args: PgraArguments,
    tokenizer: Any,
    context: Context = ALONE,
) -> TokenizedInputs:
    """Tokenise a split with its evidence, or take up what is there.

    Args:
        found: The task's examples with their evidence.
        split: Which of them.
        args: Layout, depth and where products go.
        tokenizer: The reader's.
        context: Who waits.

    Raises:
        PgraError: As `build_inputs` and `store_inputs`.
    """
    examples, layout = found.examples(split), segment_layout(found.task, args.reader)
    verbalizer = task_verbalizer(found.task, args.reader)
    fields: dict[str, Json] = {
        **asdict(layout),
        "tokenizer": tokenizer_identity(tokenizer),
        "examples": examples_digest(examples),
        "evidence": found.fingerprints.get(f"evidence/{split}"),
        "corpus": found.fingerprints.get("corpus"),
        "num_evidence": found.depth,
    }
    return store_inputs(
        args.artifacts / "inputs" / found.task.name,
        split,
        fields,
        lambda: build_inputs(
            examples, found.evidence_texts(split), tokenizer, verbalizer, layout=layout
        ),
        examples=examples,
        tokenizer=tokenizer,
        verbalizer=verbalizer,
        context=context,
    )
