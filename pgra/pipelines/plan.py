"""What a task's second stage will cost, before it is run: `pgra plan`.

Counts what there is to read, tokenises a sample of it, and lets the LM read for a few seconds on
the device at hand. Only the corpus is written to disk, as any command does that opens it.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pgra.config import PgraArguments
from pgra.data.corpus import Corpus
from pgra.errors import ConfigError
from pgra.models.calibration import measure_speed, own_lengths
from pgra.models.flops import LmShape
from pgra.models.loading import batch_budget
from pgra.models.prefix import PromptedEncoder
from pgra.pipelines.costs import (
    WHOLE,
    Plan,
    Reading,
    Sizes,
    Texts,
    add_plans,
    describe_device,
    index_bytes,
)
from pgra.pipelines.found import SPLITS, Found
from pgra.pipelines.pgra import open_stages, read_task
from pgra.pipelines.plan_neighbors import NeighborPlanner
from pgra.rerank import AveragedReranker, NeighborReranker, PromptedReranker
from pgra.rerank.prompted import query_key
from pgra.retrieval.choice import EXACT, choose_factory, memory_limit
from pgra.retrieval.factory import empty_index
from pgra.retrieval.survey import FirstStage, Survey
from pgra.types import Example, Rows

logger = logging.getLogger(__name__)

_SAMPLE = 2000
_SEED = 0
_STATE_BYTES = {"float16": 2, "int8": 1}
_ROW_BYTES = 12  # a key and a norm
_SCALE_BYTES = 8  # of a shard's column: its middle and its step


def make_plan(args: PgraArguments, *, seconds: float = 10.0) -> Plan:
    """Foresee what the second stage will cost.

    Args:
        args: As for the run itself.
        seconds: How long the LM reads to measure its speed; 0 runs no model and predicts no time.

    Raises:
        ConfigError: If the arguments leave the LM nothing to do.
        PgraError: As the stages themselves would.
    """
    if args.rerank.num_evidence == 0 or args.rerank.reranker != "prompted":
        raise ConfigError(
            "the LM has nothing to read with --num_evidence 0 or --reranker none: "
            "plan a run with --reranker prompted"
        )
    found = read_task(args)
    open_stages(found, args)
    assert found.corpus is not None
    if isinstance(found.reranker, NeighborReranker):
        survey = first_stage(args, found, found.corpus, seconds)
        return NeighborPlanner(args, found, survey, found.reranker, seconds).plan()
    if isinstance(found.reranker, AveragedReranker):
        plans: list[Plan] = []
        for member in found.reranker.members:
            known = plans[0].first if plans else None
            left = 0 if any(plan.speed for plan in plans) else seconds  # one LM, one speed
            plans.append(_Planner(args, found, found.corpus, member, left, known).plan())
        return add_plans(plans)
    assert isinstance(found.reranker, PromptedReranker)
    return _Planner(args, found, found.corpus, found.reranker, seconds).plan()


def first_stage(args: PgraArguments, found: Found, corpus: Corpus, seconds: float) -> Survey:
    """Give a task's first stage, to be looked into."""
    return Survey(
        args=args.retriever,
        corpus=corpus,
        artifacts=args.artifacts,
        task=found.task.name,
        splits={split: found.examples(split) for split in SPLITS},
        device=args.runtime.device,
        seconds=seconds,
    )


@dataclass(frozen=True)
class _Part:
    sampled: int
    tokens: float
    tokens_whole: float
    flops: float
    flops_whole: float


@dataclass(frozen=True)
class _Passages:
    count: int
    to_read: int
    missing: Rows
    basis: str
    drawn: int = 0


@dataclass(frozen=True)
class _Planner:
    args: PgraArguments
    found: Found
    corpus: Corpus
    reranker: PromptedReranker
    seconds: float
    known: FirstStage | None = None

    @property
    def encoder(self) -> PromptedEncoder:
        return self.reranker.encoder

    @cached_property
    def examples(self) -> dict[str, list[Example]]:
        return {split: self.found.examples(split) for split in SPLITS}

    @cached_property
    def queries(self) -> dict[int, Example]:
        every = [example for split in SPLITS for example in self.examples[split]]
        return {query_key(example): example for example in every}

    @cached_property
    def first(self) -> FirstStage | None:
        """Look into the first stage; None where there is none."""
        if self.args.is_exhaustive or self.known is not None:
            return self.known
        return first_stage(self.args, self.found, self.corpus, self.seconds).run()

    def plan(self) -> Plan:
        shape = LmShape.of(self.encoder.lm.config)
        factory = self._states_factory(shape.state)
        if self.args.is_exhaustive and factory != EXACT:  # refused as when it is built
            width = self.reranker.fitting.num_columns(shape.state)
            empty_index(factory, width, len(self.corpus))
        texts, rows = self._texts()
        reading = self._reading(texts, rows, shape)
        speed = None
        if self.seconds > 0 and texts.to_read:
            speed = measure_speed(self.encoder, self._shards(rows), seconds=self.seconds)
        return Plan(
            task=self.found.task.name,
            lm=self.args.rerank.lm,
            device=describe_device(self.encoder.lm),
            first=self.first,
            texts=texts,
            reading=reading,
            sizes=self._sizes(texts, shape),
            shards=max(1, -(-texts.to_read // self.reranker.shard_rows)),
            speed=speed,
        )

    def _texts(self) -> tuple[Texts, Rows]:
        """Count; also give rows that stand for the passages to read, all of them if known."""
        queries = {split: len(examples) for split, examples in self.examples.items()}
        num_queries, num_rows = sum(queries.values()), len(self.corpus)
        num_candidates = self.args.retriever.num_candidates if self.first else num_rows
        part = self._passages()
        new_queries = len(self._new_queries)
        pairs = num_queries * num_candidates
        texts = Texts(
            queries=queries,
            num_candidates=num_candidates,
            pairs=pairs,
            distinct_queries=len(self.queries),
            distinct_passages=part.count,
            most_passages=min(num_rows, pairs + part.drawn) if part.basis != WHOLE else num_rows,
            basis=part.basis,
            banked=part.count - part.to_read + len(self.queries) - new_queries,
            to_read=part.to_read + new_queries,
        )
        return texts, part.missing

    def _passages(self) -> _Passages:
        """Count the candidates, and the passages that the similarity is fitted to."""
        first, bank, drawn = self.first, self.reranker.bank, self.reranker.fitting.rows()
        num_rows = len(self.corpus)
        if first is None or self.args.rerank.bank == "full":
            missing = bank.missing(np.arange(num_rows))
            return _Passages(num_rows, len(missing), missing, WHOLE)
        if first.is_exact:
            rows = np.union1d(first.rows, drawn)
            missing = bank.missing(rows)
            return _Passages(len(rows), len(missing), missing, first.basis, len(drawn))
        # Where nothing was searched, any passage may be a candidate.
        rows = first.rows if len(first.rows) else np.arange(num_rows)
        missing, more = bank.missing(rows), bank.missing(drawn)
        others = 1 - first.num_texts / num_rows  # of those drawn, the share that is no candidate
        to_read = round(first.num_texts * len(missing) / len(rows) + others * len(more))
        count = first.num_texts + round(others * len(drawn))
        return _Passages(count, to_read, np.union1d(missing, more), first.basis, len(drawn))

    def _reading(self, texts: Texts, rows: Rows, shape: LmShape) -> Reading:
        """Tokenise some passages and some queries; each stands for its share of its kind."""
        passages = [
            self.encoder.prompt.template.passage_fields(t) for t in self._draw(rows, _SAMPLE, _SEED)
        ]
        new = self._new_queries
        queries = random.Random(_SEED).sample(new, min(_SAMPLE, len(new)))
        cut = self.encoder.num_cut
        parts = [
            self._part(passages, texts.to_read - len(new), shape),
            self._part([query.fields for query in queries], len(new), shape),
        ]
        sampled = sum(part.sampled for part in parts)
        once = self._shared if sampled else 0
        return Reading(
            prefix=len(self.encoder.shared_ids),
            own_mean=sum(part.tokens for part in parts) / max(1, texts.to_read),
            sampled=sampled,
            cut=(self.encoder.num_cut - cut) / max(1, sampled),
            tokens=round(sum(part.tokens for part in parts)) + once,
            tokens_whole=round(sum(part.tokens_whole for part in parts)),
            flops=sum(part.flops for part in parts) + shape.flops([once]),
            flops_whole=sum(part.flops_whole for part in parts),
        )

    def _part(self, fields: Sequence[Mapping[str, str]], count: int, shape: LmShape) -> _Part:
        """Count what reading `count` texts like these costs."""
        ids = self.encoder.tokenize(fields).ids
        own, whole = own_lengths(self.encoder, ids), [len(one) for one in ids]
        times = count / max(1, len(ids))
        return _Part(
            sampled=len(ids),
            tokens=times * sum(own),
            tokens_whole=times * sum(whole),
            flops=times * shape.flops(own, behind=self._shared),
            flops_whole=times * shape.flops(whole),
        )

    @property
    def _shared(self) -> int:
        """Give how many tokens are read once for all texts."""
        return len(self.encoder.shared_ids) if self.encoder.sharing != "none" else 0

    @property
    def _new_queries(self) -> list[Example]:
        keys = self.reranker.query_bank.missing(list(self.queries)).tolist()
        return [self.queries[key] for key in keys]

    def _draw(self, rows: Rows, count: int, seed: int) -> list[str]:
        if len(rows) <= count:
            return self.corpus.texts(rows)
        rng = np.random.default_rng(seed)
        return self.corpus.texts(rng.choice(rows, count, replace=False))

    def _shards(self, rows: Rows) -> Iterator[list[str]]:
        """Draw texts as the fill will meet them, a shard at a time."""
        size = self.reranker.shard_rows
        for seed in range(max(1, -(-len(rows) // size))):
            yield self._draw(rows, size, seed + 1) or [q.text for q in self._new_queries][:size]

    def _sizes(self, texts: Texts, shape: LmShape) -> Sizes:
        lm = self.encoder.lm
        item = torch.empty(0, dtype=lm.dtype).element_size()
        own = batch_budget(self.args.rerank.lm_batch_tokens, lm.device)
        return Sizes(
            bank=self._bank_bytes(texts, shape.state, item),
            index=self._index_bytes(shape.state),
            weights=shape.weight_bytes(item, lm.quantization),
            prefix=shape.cache_bytes(self._shared, item),
            batch=shape.batch_bytes(own, item),
        )

    def _bank_bytes(self, texts: Texts, width: int, item: int) -> int:
        """Give the bytes of the states to come; those of queries are kept as the LM gives them."""
        args, queries = self.args.rerank, len(self._new_queries)
        passages = texts.to_read - queries
        kept = passages * width * _STATE_BYTES.get(args.bank_dtype, item) + queries * width * item
        if args.bank_dtype == "int8":
            kept += -(-passages // self.reranker.shard_rows) * width * _SCALE_BYTES
        return kept + texts.to_read * _ROW_BYTES

    def _states_factory(self, state: int) -> str:
        args, width = self.args.retriever, self.reranker.fitting.num_columns(state)
        memory = memory_limit(args.index_memory_gb)
        return choose_factory(args.index_factory, len(self.corpus), width, memory=memory).factory

    def _index_bytes(self, state: int) -> int:
        first, num_rows = self.first, len(self.corpus)
        if first is None:  # exhaustive: an index of the states themselves, or none
            factory = self._states_factory(state)
            width = self.reranker.fitting.num_columns(state)
            return 0 if factory == EXACT else num_rows * width * 4
        return index_bytes(first, num_rows)
