"""What the second stage will cost where each query has a prefix of its own (`--exemplars knn`).

No state is shared between queries: the LM reads each query's prefix, the query and its k
candidates. Prefixes are foreseen with exemplars by chance, as long as others on average: which
are the nearest is not looked up for that, nor does the LM run.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from pgra.config import PgraArguments
from pgra.models.calibration import measure_speed
from pgra.models.flops import LmShape
from pgra.models.loading import batch_budget
from pgra.models.prefix import PromptedEncoder
from pgra.pipelines.costs import (
    MOST_PAIRS,
    PAIRS,
    Plan,
    Reading,
    Sizes,
    Texts,
    describe_device,
    index_bytes,
)
from pgra.pipelines.found import SPLITS, Found
from pgra.rerank import NeighborReranker
from pgra.rerank.neighbors import KEPT
from pgra.rerank.prompted import query_key
from pgra.retrieval.survey import FirstStage, Survey
from pgra.types import Example, Rows

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
