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
from pgra.core import MISSING_ROW, Example, Rows
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.retrieval import IndexRequest, Retriever, find_retriever, open_retriever
from pgra.retrieval.base import IndexIdentity, candidates_fields
from pgra.retrieval.dense import settle_factory
from pgra.retrieval.faiss import EXACT

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
            stand for them; the whole corpus where nothing was searched.
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
        request: The first stage, as it would be opened.
        task: The task's name.
        splits: The queries, by split.
        seconds: About how long looking may take; 0: no model is run.
    """

    request: IndexRequest
    task: str
    splits: Mapping[str, Sequence[Example]]
    seconds: float = 10.0

    def run(self) -> FirstStage:
        """Find out; see the module.

        Raises:
            PgraError: As `open_retriever`, a wrong index_factory too.
        """
        request, args = self.request, self.request.args
        corpus, encoder = request.corpus, None
        if args.retriever == "exhaustive":  # there is no first stage: all are read
            return FirstStage(np.arange(len(corpus)), len(corpus), WHOLE, len(corpus))
        cls = find_retriever(args.retriever)
        if cls.encodes:
            encoder = load_encoder(args, request.context.device)
            args = replace(args, index_factory=settle_factory(args, len(corpus), encoder.width))
            request = replace(request, args=args)
        identity = cls.identify(request)
        folders = identity.folders if identity is not None else ()
        finished = [folder for folder in folders if is_finished(folder)]
        is_built = len(finished) == len(folders)
        is_encoded = encoder is None or any(map(is_finished, folders[:1]))
        # What independent draws would give; real candidates repeat more.
        num_queries = sum(map(len, self.splits.values()))
        missed = (1 - min(1.0, args.num_candidates / len(corpus))) ** num_queries
        base = FirstStage(
            rows=np.arange(len(corpus)),
            num_texts=round(len(corpus) * (1 - missed)),
            basis=GUESSED,
            num_candidates=args.num_candidates,
            is_full=not args.retriever.startswith(("bm25", "run:")),  # they may find fewer
            num_to_encode=0 if is_encoded else len(corpus),
            width=encoder.width if encoder else 0,
            index_bytes=sum(p.stat().st_size for f in finished for p in f.iterdir() if p.is_file()),
        )
        stored = None if identity is None else self._read_stored(identity)
        if stored is not None:
            rows = _distinct(stored)
            return replace(
                base,
                rows=rows,
                num_texts=len(rows),
                basis=STORED,
                stored=stored,
                seconds=0.0 if is_built else None,  # an index that is gone is built all the same
            )
        if self.seconds <= 0:
            return base
        if not is_built:
            return self._try(base, request, encoder)
        retriever = open_retriever(args, corpus, request.context, options=request.options)
        return self._count(base, retriever, args.num_candidates, len(corpus))

    def _read_stored(self, identity: IndexIdentity) -> Rows | None:
        """Read the candidates of all splits, (B, K), if all are there."""
        args, found = self.request.args, []
        for split, examples in self.splits.items():
            fields = candidates_fields(
                identity.fingerprint, args.retriever, args.num_candidates, examples=examples
            )
            root = self.request.context.artifacts / "candidates" / self.task
            folder = artifact_dir(root, split, fields)
            if not is_finished(folder):
                return None
            found.append(np.asarray(read_array(folder / "rows.npy")))
        return np.concatenate(found)

    def _count(self, base: FirstStage, retriever: Retriever, k: int, num_rows: int) -> FirstStage:
        """Search so many passages with all queries, or with as many as the time allows."""
        texts = [example.text for split in self.splits.values() for example in split]
        queries = random.Random(_SEED).sample(texts, len(texts))  # any first part is a fair sample
        found = [np.empty((0, k), np.int64)]
        start, done = time.perf_counter(), 0
        while done < len(queries):
            end = min(max(32, 2 * done), len(queries))
            found.append(retriever.retrieve(queries[done:end], k).rows)
            done = end
            if time.perf_counter() - start > _PATIENCE / 2 * self.seconds:  # half: steps double
                break
        rows = np.concatenate(found)
        return replace(
            base,
            rows=_distinct(rows),
            num_texts=expect_distinct(rows, len(queries), most=num_rows),
            basis=SEARCHED if done == len(queries) else SAMPLED,
            seconds=(time.perf_counter() - start) * len(queries) / max(1, done),
        )

    def _try(self, base: FirstStage, request: IndexRequest, encoder: Encoder | None) -> FirstStage:
        """Build a small index aside and search it, if it would not be too small to tell."""
        corpus, k, rate = request.corpus, request.args.num_candidates, math.inf
        num_rows, rng = len(corpus), np.random.default_rng(_SEED)
        if encoder is not None:
            pilot = corpus.texts(rng.choice(num_rows, min(_PILOT, num_rows), replace=False))
            encoder.encode(pilot[:8])  # the first batch is slow
            start = time.perf_counter()
            encoder.encode(pilot)
            rate = len(pilot) / (time.perf_counter() - start)
        size, depth = trial_size(num_rows, k, min(_TRIAL_ROWS, rate * _PATIENCE * self.seconds))
        if not size:
            return base
        rows = np.sort(rng.choice(num_rows, size, replace=False))
        logger.info("no index yet: a trial with %d of %d passages, aside", size, num_rows)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "trial.txt"
            source.write_text("".join(f"{text}\n" for text in corpus.texts(rows)), "utf-8")
            aside = CorpusArguments(corpus=str(source), drop_duplicates=False)
            retriever = open_retriever(
                replace(request.args, index_factory=EXACT, index_dir=None, num_candidates=depth),
                open_corpus(aside, Path(folder), is_quiet=True),
                replace(request.context, artifacts=Path(folder)),
                options=request.options,
            )
            found = self._count(base, retriever, depth, size)
        is_whole = size == num_rows and found.basis == SEARCHED
        return replace(
            found,
            rows=rows[found.rows],
            num_texts=round(min(1.0, found.num_texts / size) * num_rows),
            basis=SEARCHED if is_whole and request.args.index_factory == EXACT else TRIAL,
            seconds=num_rows / rate + (found.seconds or 0.0),
        )


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
