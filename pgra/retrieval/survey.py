"""How many distinct passages a first stage will bring, before it is run. Writes no product.

In order: candidates on disk are counted; an index on disk is searched, with all queries or as many
as the time allows; otherwise a small index of randomly drawn passages is built aside and searched
for proportionally fewer candidates, and the share of them that is found stands for the corpus.
"""

import logging
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pgra.artifacts import artifact_dir, is_finished, read_array
from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import MISSING_ROW, Context, Example, Json, Rows
from pgra.data.corpus import Corpus, open_corpus
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.retrieval import (
    RETRIEVERS,
    IndexRequest,
    Retriever,
    find_retriever,
    open_retriever,
)
from pgra.retrieval.base import candidates_fields
from pgra.retrieval.bm25 import bm25_fingerprint
from pgra.retrieval.dense import (
    dense_fingerprint,
    search_fields,
    settle_factory,
    with_history,
)
from pgra.retrieval.faiss import empty_index
from pgra.retrieval.hybrid import hybrid_fingerprint
from pgra.retrieval.random import random_fingerprint

logger = logging.getLogger(__name__)

STORED, SEARCHED, WHOLE = "stored", "searched", "whole corpus"
"""How a number was counted."""
SAMPLED, TRIAL, GUESSED = "sampled", "trial", "guessed"
"""How it was estimated."""

_PILOT = 256  # texts that tell how fast the encoder is
_TRIAL_ROWS = 1 << 14
_PATIENCE = 3  # times the seconds given that a search or a trial may take
_SEED = 0


@dataclass(frozen=True)
class FirstStage:
    """What the first stage will bring and cost.

    Attributes:
        rows: Distinct passages among the candidates: all of them where `is_exact`, else some that
            stand for them; empty where nothing was searched.
        num_texts: How many there are, or are expected.
        basis: How that was found: "stored", "searched", "whole corpus", "sampled", "trial" or
            "guessed".
        num_candidates: K.
        is_full: Whether every query gets so many.
        stored: Candidates (B, K) of all queries, where they are on disk.
        num_to_encode: Passages that the encoder has yet to read; 0 with a finished index.
        width: D, of a vector; 0 without an encoder.
        index_bytes: Of a finished index.
        seconds: How long building and searching will take, about; None where nothing was timed.
    """

    rows: Rows
    num_texts: int
    basis: str
    num_candidates: int
    is_full: bool = True
    stored: Rows | None = None
    num_to_encode: int = 0
    width: int = 0
    index_bytes: int = 0
    seconds: float | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether `rows` are all there will be."""
        return self.basis in (STORED, SEARCHED, WHOLE)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A first stage that is looked into.

    Attributes:
        args: Its arguments.
        corpus: What it searches.
        artifacts: Root of all products.
        task: The task's name.
        splits: The queries, by split.
        device: What encodes.
        seconds: About how long looking may take; 0: no model is run.
    """

    args: RetrieverArguments
    corpus: Corpus
    artifacts: Path
    task: str
    splits: Mapping[str, Sequence[Example]]
    device: str = "auto"
    seconds: float = 10.0

    def run(self) -> FirstStage:
        """Find out; see the module.

        Raises:
            PgraError: As `open_retriever`, a wrong index_factory too.
        """
        if self.args.retriever == "exhaustive":  # there is no first stage: all are read
            rows = np.arange(len(self.corpus))
            return FirstStage(rows, len(rows), WHOLE, len(rows))
        has_encoder = find_retriever(self.args.retriever).encodes
        encoder = load_encoder(self.args, self.device) if has_encoder else None
        if encoder is None:
            return self._run(None)
        factory = settle_factory(self.args, len(self.corpus), encoder.width)
        return replace(self, args=replace(self.args, index_factory=factory))._run(encoder)

    def _run(self, encoder: Encoder | None) -> FirstStage:
        parts = self._parts(encoder)
        folders = {name: self._find_index(name, fields) for name, fields in parts.items()}
        there = [folder for folder in folders.values() if folder is not None]
        if (home := folders.get("dense")) is not None:
            parts["dense"] = with_history(home, parts["dense"])
        if encoder is not None and folders["dense"] is None:  # refused as when it is built
            empty_index(self.args.index_factory, encoder.width, len(self.corpus))
        is_built, is_encoded = len(there) == len(parts), folders.get("dense") or encoder is None
        base = FirstStage(
            rows=np.empty(0, np.int64),
            num_texts=0,
            basis=GUESSED,
            num_candidates=self.args.num_candidates,
            is_full=self.args.retriever != "bm25",  # words may find fewer
            num_to_encode=0 if is_encoded else len(self.corpus),
            width=encoder.width if encoder else 0,
            index_bytes=sum(p.stat().st_size for f in there for p in f.iterdir() if p.is_file()),
        )
        found = self._read_stored(_with_query(parts, encoder))
        if found is not None:
            rows = _distinct(found)
            return replace(
                base,
                rows=rows,
                num_texts=len(rows),
                basis=STORED,
                stored=found,
                seconds=0.0 if is_built else None,  # an index that is gone is built all the same
            )
        if self.seconds > 0 and is_built:
            return self._search(base)
        tried = self._try(base, encoder) if self.seconds > 0 else None
        return tried or replace(base, num_texts=self._guess())

    def _parts(self, encoder: Encoder | None) -> dict[str, Mapping[str, Json]]:
        """Return what determines each index of the retriever; a random one has none."""
        parts: dict[str, Mapping[str, Json]] = {}
        if encoder is not None:
            parts["dense"] = dense_fingerprint(self.corpus, encoder, self.args.index_factory)
        if self.args.retriever in ("bm25", "hybrid"):
            parts["bm25"] = bm25_fingerprint(self.corpus)
        return parts

    @property
    def _context(self) -> Context:
        return Context(artifacts=self.artifacts, device=self.device, progress=False)

    @property
    def _queries(self) -> list[str]:
        """Return all queries, shuffled, so that any first part is a fair sample."""
        texts = [example.text for split in self.splits.values() for example in split]
        return random.Random(_SEED).sample(texts, len(texts))

    def _find_index(self, part: str, fields: Mapping[str, Json]) -> Path | None:
        if self.args.index_dir is not None and part in (self.args.retriever, "dense"):
            args = replace(self.args, retriever=part)  # hybrid's own is its dense one
            request = IndexRequest(args=args, corpus=self.corpus, context=self._context)
            return find_retriever(part).prepare(request)[0].folder  # checks it, and builds nothing
        # The name before the digest is the encoder's, and says nothing more.
        digest = artifact_dir(self.artifacts, "x", fields).name.removeprefix("x-")
        found = (self.artifacts / "indexes").glob(f"*-{digest}")
        return next((folder for folder in found if is_finished(folder)), None)

    def _read_stored(self, parts: Mapping[str, Mapping[str, Json]]) -> Rows | None:
        """Read the candidates of all splits, (B, K), if all are there."""
        if self.args.retriever not in RETRIEVERS:  # only opening it tells what it depends on
            return None
        made_of = self._made_of(parts)
        found = []
        for split, examples in self.splits.items():
            args = self.args
            fields = candidates_fields(
                made_of, args.retriever, args.num_candidates, examples=examples
            )
            folder = artifact_dir(self.artifacts / "candidates" / self.task, split, fields)
            if not is_finished(folder):
                return None
            found.append(np.asarray(read_array(folder / "rows.npy")))
        return np.concatenate(found)

    def _made_of(self, parts: Mapping[str, Mapping[str, Json]]) -> Mapping[str, Json]:
        """Return the retriever's fingerprint."""
        if self.args.retriever == "random":
            return random_fingerprint(self.corpus)
        if "dense" in parts:
            fields = search_fields(self.args, self.args.index_factory)
            parts = {**parts, "dense": {**parts["dense"], **fields}}
        if self.args.retriever == "hybrid":
            return hybrid_fingerprint(parts["dense"], parts["bm25"])
        return parts[self.args.retriever]

    def _search(self, base: FirstStage) -> FirstStage:
        retriever = open_retriever(self.args, self.corpus, self._context)
        return self._count(base, retriever, self.args.num_candidates, len(self.corpus))

    def _count(self, base: FirstStage, retriever: Retriever, k: int, num_rows: int) -> FirstStage:
        """Search so many passages with all queries, or with as many as the time allows."""
        queries, found = self._queries, [np.empty((0, k), np.int64)]
        start, done, step = time.perf_counter(), 0, 32
        while done < len(queries):
            found.append(retriever.retrieve(queries[done : done + step], k).rows)
            done = min(done + step, len(queries))
            spent = time.perf_counter() - start
            left = _PATIENCE * self.seconds - spent
            if left <= 0:
                break
            step = max(1, min(done, int(done * left / max(spent, 1e-9))))
        rows = np.concatenate(found)
        every = _distinct(rows)
        seconds = (time.perf_counter() - start) * len(queries) / max(1, done)
        if done == len(queries):
            return replace(base, rows=every, num_texts=len(every), basis=SEARCHED, seconds=seconds)
        texts = expect_distinct(rows, len(queries), most=num_rows)
        return replace(base, rows=every, num_texts=texts, basis=SAMPLED, seconds=seconds)

    def _try(self, base: FirstStage, encoder: Encoder | None) -> FirstStage | None:
        """Build a small index aside and search it; None where it would be too small to tell."""
        num_rows, k = len(self.corpus), self.args.num_candidates
        rng = np.random.default_rng(_SEED)
        rate = math.inf
        if encoder is not None:
            pilot = self.corpus.texts(rng.choice(num_rows, min(_PILOT, num_rows), replace=False))
            encoder.encode(pilot[:8])  # the first batch is slow
            start = time.perf_counter()
            encoder.encode(pilot)
            rate = len(pilot) / (time.perf_counter() - start)
        size, depth = trial_size(num_rows, k, min(_TRIAL_ROWS, rate * _PATIENCE * self.seconds))
        if not size:
            return None
        rows = np.sort(rng.choice(num_rows, size, replace=False))
        logger.info("no index yet: a trial with %d of %d passages, aside", size, num_rows)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "trial.txt"
            source.write_text("".join(f"{text}\n" for text in self.corpus.texts(rows)), "utf-8")
            aside = CorpusArguments(corpus=str(source), drop_duplicates=False)
            args = replace(self.args, index_factory="Flat", index_dir=None, num_candidates=depth)
            corpus = open_corpus(aside, Path(folder), is_quiet=True)
            where = replace(self._context, artifacts=Path(folder))
            retriever = open_retriever(args, corpus, where)
            found = self._count(base, retriever, depth, size)
        share = min(1.0, found.num_texts / size)
        is_whole = size == num_rows and found.basis == SEARCHED
        building = num_rows / rate
        return replace(
            found,
            rows=rows[found.rows],
            num_texts=round(share * num_rows),
            basis=SEARCHED if is_whole and self.args.index_factory == "Flat" else TRIAL,
            seconds=building + (found.seconds or 0.0),
        )

    def _guess(self) -> int:
        """Expect what independent draws would give; real candidates repeat more."""
        num_rows, num_queries = len(self.corpus), sum(map(len, self.splits.values()))
        kept = (1 - min(1.0, self.args.num_candidates / num_rows)) ** num_queries
        return round(num_rows * (1 - kept))


def _with_query(
    parts: Mapping[str, Mapping[str, Json]], encoder: Encoder | None
) -> Mapping[str, Mapping[str, Json]]:
    """Add to what determines indexes what only the queries' vectors depend on."""
    if encoder is None:
        return parts
    return {**parts, "dense": {**parts["dense"], **encoder.query_fields}}


def trial_size(num_rows: int, k: int, most: float) -> tuple[int, int]:
    """Choose how many passages a trial has, and how many candidates stand for k.

    The two shrink alike, so that a passage is among the candidates as often as in the corpus.

    Returns:
        (passages, candidates); (0, 0) where even one candidate needs more than `most` passages.
    """
    if num_rows <= most:
        return num_rows, k
    depth = int(most * k / num_rows)
    return (min(num_rows, round(num_rows * depth / k)), depth) if depth else (0, 0)


def expect_distinct(rows: Rows, num_queries: int, *, most: int) -> int:
    """Expect how many distinct passages all queries bring, from those of some.

    Growth by a power of the number of queries (Heaps' law), as between half of them and all, is too
    fast, for it slows down. Chao's estimate for incidences (Colwell et al. 2012, eq. 18) is too
    slow, for it is a lower bound. The truth lies between: on real queries and passages their
    geometric mean was within a fifth of it, from 64 of 1,020 queries on.

    Args:
        rows: (n, K), of a fair sample of n queries.
        num_queries: How many there are in all.
        most: Passages there are.
    """
    asked = len(rows)
    distinct, times = np.unique(rows[rows != MISSING_ROW], return_counts=True)
    seen = len(distinct)
    if not seen:
        return 0
    half = max(1, len(_distinct(rows[: asked // 2])))
    upper = seen * math.pow(num_queries / asked, math.log2(seen / half))
    once, twice = int((times == 1).sum()), int((times == 2).sum())
    unseen = (asked - 1) / asked * (once**2 / (2 * twice) if twice else once * (once - 1) / 2)
    lower = float(seen)
    if unseen:
        lower += unseen * (1 - (1 - once / (once + asked * unseen)) ** (num_queries - asked))
    return round(math.sqrt(min(upper, most) * min(lower, most)))


def _distinct(rows: Rows) -> Rows:
    return np.unique(rows[rows != MISSING_ROW])
