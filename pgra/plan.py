"""What a task's second stage will cost, before it is run: `pgra plan`.

Counts what there is to read, tokenises a sample of it, and lets the LM read for a few seconds on
the device at hand. Only the corpus is written to disk, as any command does that opens it.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from pgra.config import PgraArguments
from pgra.core import Example, Rows
from pgra.data.corpus import Corpus
from pgra.errors import ConfigError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.cost import LmShape, Speed, measure_speed, own_lengths
from pgra.lm.load import batch_budget, dtype_name
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.pgra import open_stages, read_task
from pgra.rerank import AveragedReranker, NeighborReranker, PromptedReranker
from pgra.rerank.bank import query_key
from pgra.rerank.neighbors import KEPT
from pgra.retrieval.faiss import EXACT, choose_factory, empty_index, memory_limit
from pgra.retrieval.survey import FirstStage, Survey
from pgra.run_folder import SPLITS, Found

# The numbers of a plan: what the second stage has to read, what that costs, what it takes.


WHOLE = "whole corpus"
"""A basis beside those of `pgra.retrieval.survey`: all passages are read."""
PAIRS, MOST_PAIRS = "every pair", "at most every pair"
"""Two more: each query has a prefix of its own, and its candidates are read under it."""


@dataclass(frozen=True)
class Texts:
    """What the LM has to read.

    Attributes:
        queries: By split.
        num_candidates: k; with the whole corpus, its size.
        pairs: Queries times k: what reading every pair would mean.
        distinct_queries: Different ones; each is read once.
        distinct_passages: Different passages among the candidates, or expected; with a prefix a
            query a passage counts once with each query.
        most_passages: No more than this, whatever is found.
        basis: How that was found; "stored", "searched", "whole corpus" and "every pair"
            are exact.
        banked: Of both, how many the bank has.
        to_read: Of both, how many the LM has yet to read.
    """

    queries: Mapping[str, int]
    num_candidates: int
    pairs: int
    distinct_queries: int
    distinct_passages: int
    most_passages: int
    basis: str
    banked: int
    to_read: int

    @property
    def is_exact(self) -> bool:
        """Say whether the numbers are counts, not estimates."""
        return self.basis in ("stored", "searched", WHOLE, PAIRS)


@dataclass(frozen=True)
class Reading:
    """Tokens and operations of reading it.

    Attributes:
        prefix: Tokens that all prompts share; with a prefix a query those of one, on average.
        own_mean: Own tokens of a text, on average.
        sampled: Texts tokenised to find that.
        cut: Share of them that are cut to fit the LM's window.
        tokens: With the prefix run once, or as often as the arguments say.
        tokens_whole: With the prefix run for every text.
        flops: As `tokens`.
        flops_whole: As `tokens_whole`.
        num_prefixes: How many prefixes there are to read: one, several that scores are averaged
            over, or one a query.
    """

    prefix: int
    own_mean: float
    sampled: int
    cut: float
    tokens: int
    tokens_whole: int
    flops: float
    flops_whole: float
    num_prefixes: int = 1

    @property
    def is_shared(self) -> bool:
        """Say whether running the prefix once saves anything; with `--prefix_sharing none` not."""
        return self.tokens < self.tokens_whole


@dataclass(frozen=True)
class Sizes:
    """Bytes.

    Attributes:
        bank: On disk, that the bank grows by.
        index: On disk: the first stage's, vectors and FAISS file; estimated if it is not built.
        weights: On the device.
        prefix: On the device: keys and values of the shared tokens.
        batch: On the device: one batch, estimated.
    """

    bank: int
    index: int
    weights: int
    prefix: int
    batch: int

    @property
    def device(self) -> int:
        """Give all that lies on the device."""
        return self.weights + self.prefix + self.batch


@dataclass(frozen=True)
class Plan:
    """A task's second stage, foreseen.

    Attributes:
        task: Its name.
        lm: As the user wrote it.
        device: Where the LM runs, and in which dtype.
        first: The first stage.
        texts: What is to be read.
        reading: What that costs.
        sizes: What it takes on disk and device.
        shards: Units of work that processes share.
        speed: What was measured; None without calibration.
    """

    task: str
    lm: str
    device: str
    first: FirstStage | None
    texts: Texts
    reading: Reading
    sizes: Sizes
    shards: int
    speed: Speed | None

    @property
    def has_own_prefixes(self) -> bool:
        """Say whether each query has a prefix of its own."""
        return self.texts.basis in (PAIRS, MOST_PAIRS)

    def seconds(self, context: int = 1) -> float | None:
        """Predict how long the LM will read, on so many devices like this one.

        Returns:
            None without calibration; 0 if nothing is left to read.
        """
        if not self.texts.to_read:
            return 0.0
        if self.speed is None:
            return None
        share = -(-self.shards // context) / self.shards  # of the process with the most shards
        return self.speed.load_seconds + share * self.reading.tokens / self.speed.tokens_per_second


def add_plans(plans: Sequence[Plan]) -> Plan:
    """Give the plan of several prefixes of one LM: texts and queries are counted once.

    Args:
        plans: One a prefix, of one task and first stage.
    """
    first, readings = plans[0], [plan.reading for plan in plans]
    most = max(plans, key=lambda plan: plan.texts.to_read)
    reading = replace(
        most.reading,
        tokens=sum(reading.tokens for reading in readings),
        tokens_whole=sum(reading.tokens_whole for reading in readings),
        flops=sum(reading.flops for reading in readings),
        flops_whole=sum(reading.flops_whole for reading in readings),
        num_prefixes=len(plans),
    )
    texts = replace(
        first.texts,
        banked=sum(plan.texts.banked for plan in plans),
        to_read=sum(plan.texts.to_read for plan in plans),
    )
    return replace(
        first,
        texts=texts,
        reading=reading,
        sizes=replace(first.sizes, bank=sum(plan.sizes.bank for plan in plans)),
        shards=sum(plan.shards for plan in plans),
        speed=next((plan.speed for plan in plans if plan.speed is not None), None),
    )


def describe_device(lm: CausalLM) -> str:
    """Name where an LM runs, and in which dtype."""
    name, dtype = lm.device.type, dtype_name(lm.dtype)
    if name == "cuda":
        return f"{torch.cuda.get_device_name(lm.device)}, {dtype}"
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}, {dtype}"


def index_bytes(first: FirstStage, num_rows: int) -> int:
    """Give the bytes of a first stage's index; of one that is not built, about."""
    if first.index_bytes or not first.width:
        return first.index_bytes
    return num_rows * first.width * (2 + 4)  # float16 shards, and FAISS' float32


# What the second stage will cost where each query has a prefix of its own (`--exemplars knn`).
#
# No state is shared between queries: the LM reads each query's prefix, the query and its k
# candidates. Prefixes are foreseen with exemplars by chance, as long as others on average: which
# are the nearest is not looked up for that, nor does the LM run.


_PREFIXES = 64  # are written to see how long they are
_TEXTS = 1000  # passages, and queries, likewise
_SEED = 0
_PAIR_BYTES = 4 * len(KEPT) + 12  # what is kept, a key and a norm


@dataclass(frozen=True)
class _Lengths:
    """Mean tokens: of a prefix, and of a query's and a passage's own part of a prompt."""

    prefix: float
    query: float
    passage: float
    sampled: int
    cut: float


@dataclass(frozen=True)
class NeighborPlanner:
    """Foresees a second stage with a prefix a query.

    Attributes:
        args: As for the run itself.
        found: The task's examples.
        survey: The first stage, to be looked into.
        reranker: The second stage.
        seconds: How long the LM reads to measure its speed; 0: it does not.
    """

    args: PgraArguments
    found: Found
    survey: Survey
    reranker: NeighborReranker
    seconds: float

    @cached_property
    def queries(self) -> dict[int, Example]:
        """Give the different queries of all splits."""
        every = [example for split in SPLITS for example in self.found.examples(split)]
        return {query_key(example): example for example in every}

    @cached_property
    def encoders(self) -> list[PromptedEncoder]:
        """Give the LM under prefixes like those to come."""
        rng, exemplars = random.Random(_SEED), self.reranker.exemplars
        pool, queries = list(exemplars.neighbors.examples), list(self.queries.values())
        draws = (
            (rng.sample(pool, exemplars.count), query)
            for query in rng.sample(queries, min(_PREFIXES, len(queries)))
        )
        base = self.reranker.encoder  # where a prefix is too long, the run leaves exemplars out
        return [exemplars.encoder_under(base, *draw) for draw in draws]

    def plan(self) -> Plan:
        """Count and measure.

        Raises:
            ConfigError: If not even a prompt without exemplars leaves room for a text.
            PgraError: As the stages themselves would.
        """
        lm = self.reranker.encoder.lm
        shape, first = LmShape.of(lm.config), self.survey.run()
        texts, num_prefixes = self._texts()
        lengths = self._lengths(first)
        speed = None
        if self.seconds > 0 and texts.to_read:
            speed = measure_speed(self.encoders[0], self._shards(first), seconds=self.seconds)
        num_pairs = texts.to_read - num_prefixes
        return Plan(
            task=self.found.task.name,
            lm=self.args.rerank.lm,
            device=describe_device(lm),
            first=first,
            texts=texts,
            reading=self._reading(lengths, num_pairs, num_prefixes, shape),
            sizes=self._sizes(lengths, num_pairs, shape, first),
            shards=max(1, -(-num_pairs // self.reranker.shard_rows)),
            speed=speed,
        )

    def _texts(self) -> tuple[Texts, int]:
        """Count the texts; also give how many queries, and so prefixes, are to be read."""
        k, num_queries = self.args.retriever.num_candidates, len(self.queries)
        pairs = new_pairs = num_queries * k
        new_queries, basis = num_queries, PAIRS
        stored = self.survey.stored() if len(self.reranker.bank) else None
        if stored is not None:  # else the bank may hold pairs of other exemplars only
            examples = [example for split in SPLITS for example in self.found.examples(split)]
            known = self.reranker.pairs(examples, np.concatenate(list(stored.values())))
            pairs, new_pairs = len(known.keys), len(self.reranker.bank.missing(known.keys))
            new_queries = self.reranker.count_queries(known)
        elif len(self.reranker.bank) or self.args.retriever.retriever == "bm25":
            basis = MOST_PAIRS  # words may find fewer than k
        by_split = {split: len(self.found.examples(split)) for split in SPLITS}
        texts = Texts(
            queries=by_split,
            num_candidates=k,
            pairs=sum(by_split.values()) * k,
            distinct_queries=num_queries,
            distinct_passages=pairs,
            most_passages=pairs,
            basis=basis,
            banked=pairs + num_queries - new_pairs - new_queries,
            to_read=new_pairs + new_queries,
        )
        return texts, new_queries

    def _lengths(self, first: FirstStage) -> _Lengths:
        """Tokenise some passages and queries behind prefixes like those to come."""
        encoder = self.encoders[0]
        queries = list(self.queries.values())
        asked = random.Random(_SEED).sample(queries, min(_TEXTS, len(queries)))
        texts = self._draw(first, _TEXTS, _SEED)
        passages = [encoder.prompt.template.passage_fields(text) for text in texts]
        cut = encoder.num_cut
        skip = len(encoder.shared_ids)
        means = [
            float(np.mean([max(1, len(ids) - skip) for ids in encoder.tokenize(fields).ids]))
            for fields in ([query.fields for query in asked], passages)
        ]
        sampled = len(asked) + len(passages)
        prefix = float(np.mean([len(one.shared_ids) for one in self.encoders]))
        share = (encoder.num_cut - cut) / sampled
        return _Lengths(prefix, means[0], means[1], sampled, share)

    def _reading(self, mean: _Lengths, pairs: int, queries: int, shape: LmShape) -> Reading:
        """Add up: a prefix and k + 1 texts a query, or the prefix with each of them."""
        texts, prefix = pairs + queries, round(mean.prefix)
        own = queries * mean.query + pairs * mean.passage
        whole = own + texts * mean.prefix
        shared = own + queries * mean.prefix
        one = [round(mean.query), round(mean.passage)]
        behind = [shape.flops([length], behind=prefix) for length in one]
        alone = [shape.flops([prefix + length]) for length in one]
        flops_whole = queries * alone[0] + pairs * alone[1]
        flops = queries * (shape.flops([prefix]) + behind[0]) + pairs * behind[1]
        is_shared = self.reranker.encoder.sharing != "none"
        own_mean = (own if is_shared else whole) / max(1, texts)
        return Reading(
            prefix=prefix,
            own_mean=own_mean,
            sampled=mean.sampled,
            cut=mean.cut,
            tokens=round(shared if is_shared else whole),
            tokens_whole=round(whole),
            flops=flops if is_shared else flops_whole,
            flops_whole=flops_whole,
            num_prefixes=queries,
        )

    def _sizes(self, mean: _Lengths, pairs: int, shape: LmShape, first: FirstStage) -> Sizes:
        lm = self.reranker.encoder.lm
        item = torch.empty(0, dtype=lm.dtype).element_size()
        own = batch_budget(self.args.rerank.lm_batch_tokens, lm.device)
        is_shared = self.reranker.encoder.sharing != "none"
        return Sizes(
            bank=pairs * _PAIR_BYTES,
            index=index_bytes(first, len(self.reranker.corpus)),
            weights=shape.weight_bytes(item, lm.quantization),
            prefix=shape.cache_bytes(round(mean.prefix), item) if is_shared else 0,
            batch=shape.batch_bytes(own, item),
        )

    def _draw(self, first: FirstStage, count: int, seed: int) -> list[str]:
        corpus = self.reranker.corpus
        rows: Rows = first.rows if len(first.rows) else np.arange(len(corpus), dtype=np.int64)
        if len(rows) > count:
            rows = np.random.default_rng(seed).choice(rows, count, replace=False)
        return corpus.texts(rows)

    def _shards(self, first: FirstStage) -> Iterator[list[str]]:
        """Draw passages as a query meets them: k behind one prefix."""
        seed = _SEED
        while seed < _SEED + len(self.queries):
            seed += 1
            yield self._draw(first, self.args.retriever.num_candidates, seed)


logger = logging.getLogger(__name__)

_SAMPLE = 2000
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
        return choose_factory(args.index_factory, len(self.corpus), width, memory=memory)[0]

    def _index_bytes(self, state: int) -> int:
        first, num_rows = self.first, len(self.corpus)
        if first is None:  # exhaustive: an index of the states themselves, or none
            factory = self._states_factory(state)
            width = self.reranker.fitting.num_columns(state)
            return 0 if factory == EXACT else num_rows * width * 4
        return index_bytes(first, num_rows)
