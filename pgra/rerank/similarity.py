"""How alike two states are, what a fitted similarity is fitted to, and candidates' scores.

    dot              the states as they are (Guo et al. 2023, eq. 3)
    cosine           states of length 1 (their code)
    whitened         each column less its mean, over its standard deviation
    whitened_cosine  the same, then of length 1 (as Timkey and van Schijndel 2021)
    label_words      the LM's own log-chances of the label words, each less its mean, over its
                     standard deviation

Hidden states have a large part in common, and a few columns far larger than the rest, so that
products tell little of the texts; mean and standard deviation take both away. And an LM under a few
shots may answer one label for nearly all texts: of the log-chances, only how they differ from what
is usual tells them apart (akin to Zhao et al. 2021, "Calibrate before use").

Passages have the means of passages, and queries those of queries: the two are of different kinds
of text, and what all queries have in common says nothing of which passage is like one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgra.artifacts import (
    artifact_dir,
    build_once,
    digest,
    is_finished,
    read_array,
    read_manifest,
    write_array,
)
from pgra.core import MISSING_ROW, Example, Json, Rows
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.prefix import PromptedEncoder
from pgra.lm.score import AnswerWords, LMHead
from pgra.rerank.bank import Bank, Floats, query_key

_ROUNDING = 1e-6  # of a column's largest value: less spread than this is float32's own


@dataclass(frozen=True)
class Way:
    """What a similarity does to states, in this order.

    Attributes:
        reads_words: Whether states become log-chances of label words.
        is_fitted: Whether mean and standard deviation are taken away.
        is_unit: Whether the length is.
    """

    reads_words: bool = False
    is_fitted: bool = False
    is_unit: bool = False


WAYS: Mapping[str, Way] = {
    "cosine": Way(is_unit=True),
    "dot": Way(),
    "label_words": Way(reads_words=True, is_fitted=True),
    "whitened": Way(is_fitted=True),
    "whitened_cosine": Way(is_fitted=True, is_unit=True),
}


@dataclass(frozen=True)
class Usual:
    """What values are like: mean and standard deviation, by column.

    Attributes:
        mean: (D,) float32.
        spread: (D,) float32; 1 where a column does not vary.
    """

    mean: Floats
    spread: Floats

    @classmethod
    def of(cls, values: Floats) -> Self:
        """Measure values (n, D)."""
        mean = values.mean(axis=0, dtype=np.float64)
        spread = values.std(axis=0, dtype=np.float64)
        varies = spread > _ROUNDING * np.abs(values).max(axis=0)
        return cls(mean.astype(np.float32), np.where(varies, spread, 1).astype(np.float32))

    def standardise(self, values: Floats) -> Floats:
        """Give values (n, D) less the mean, over the spread."""
        standard: Floats = (values - self.mean) / self.spread
        return standard


@dataclass(frozen=True)
class WordRows:
    """What an LM's head has of the label words.

    Attributes:
        weight: (C, H) float32, a row for the token that each word begins with.
        bias: (C,) float32.
    """

    weight: Floats
    bias: Floats

    def log_chances(self, states: Floats) -> Floats:
        """Give the log-probability of each word among these words, (n, C), behind states (n, H)."""
        # A matrix product's last digits depend on how many states there are; these do not.
        logits: Floats = np.stack([np.vecdot(states, row) for row in self.weight], 1) + self.bias
        logits -= logits.max(axis=1, keepdims=True)
        chances: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return chances


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """One way, ready to use.

    Attributes:
        words: The head's rows of the label words; None: states stay states.
        passages: What passages are like; None where nothing is taken away.
        queries: What queries are like.
        is_unit: Whether each is divided by its length.
    """

    words: WordRows | None = None
    passages: Usual | None = None
    queries: Usual | None = None
    is_unit: bool = False

    def of_passages(self, states: Floats, norms: Floats) -> Floats:
        """Give what is compared with a query.

        Args:
            states: (n, H).
            norms: (n,), of these states.

        Returns:
            (n, D): H columns, or one a label word.
        """
        return self._change(states, norms, self.passages)

    def of_queries(self, states: Floats, norms: Floats) -> Floats:
        """Give what is compared with passages; see `of_passages`."""
        return self._change(states, norms, self.queries)

    def values(self, states: Floats) -> Floats:
        """Give what mean and spread are taken of: the states, or log-chances of words."""
        return states if self.words is None else self.words.log_chances(states)

    def _change(self, states: Floats, norms: Floats, usual: Usual | None) -> Floats:
        values = self.values(states)
        if usual is not None:
            values = usual.standardise(values)
        if not self.is_unit:
            return values
        lengths = norms if values is states else np.linalg.norm(values, axis=1)
        unit: Floats = values / np.where(lengths == 0, 1, lengths).astype(np.float32)[:, None]
        return unit


PLAIN: Mapping[str, Similarity] = {
    name: Similarity(is_unit=way.is_unit) for name, way in WAYS.items() if not way.is_fitted
}
"""Those that need nothing but the states."""


# What a fitted similarity is fitted to: a draw of passages, a draw of training queries, the words.
#
# The draws depend on the corpus and on the training queries alone: not on which candidates are in
# the bank, so that all k and d share one ranking, nor on the reader's seed; and no test query is
# among them. What was measured is a product of its own, so that a new query is scored as the
# run's were, without the training data:
#
#     passages.npy  (2, D) float32: mean and spread of passages' values
#     queries.npy   (2, D) float32: of queries' values
#     words.npy     (C, H + 1) float32, label words only: the head's rows, with the bias at the end


STAGE = "similarity"
SAMPLE = 2000
_SEED = 0
_FEWEST = 2
_OWN_FIELDS = ("similarity_sample", "label_tokens")


@dataclass(frozen=True)
class Reference:
    """What a task gives a similarity.

    Attributes:
        queries: The training queries, those in the prompt left out.
        words: The word that answers, by label.
        made: The reranker's fingerprint of an earlier run that is taken up, without its training
            queries; None for a new one.
    """

    queries: Sequence[Example] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Json] | None = None

    def of_prefix(self, place: int, count: int) -> "Reference":
        """Give the reference of one of several prefixes."""
        if self.made is None or count == 1:
            return self
        made: Any = self.made
        return replace(self, made=made["prefixes"][place])


class Fitting:
    """Fits a similarity once, or takes up what is there; those that need no fit are just there.

    Attributes:
        name: A name of `WAYS`.
        fingerprint: All that scores depend on, besides queries and candidates.
        folder: Where what was measured is.
    """

    def __init__(
        self,
        name: str,
        encoder: PromptedEncoder,
        reference: Reference,
        *,
        num_rows: int,
        made_of: Mapping[str, Json],
        home: Path,
    ) -> None:
        """Draw, and refuse what cannot be fitted.

        Args:
            name: A name of `WAYS`.
            encoder: LM, with its head for label words, and prompt.
            reference: What the task gives.
            num_rows: Passages of the corpus.
            made_of: What passages' states depend on.
            home: Where the folder goes, with the beginning of its name.

        Raises:
            ConfigError: If there are too few texts to measure, or label words begin alike.
            ModelError: If the tokenizer joins a word to the prompt.
        """
        self.name, self._way, self._encoder = name, WAYS[name], encoder
        self._num_rows, self._is_known = num_rows, reference.made is not None
        self._queries = _draw_queries(reference.queries) if self._way.is_fitted else {}
        fields = self._fields(reference) if self._way.is_fitted else {}
        self._tokens = fields.get("label_tokens")
        self.fingerprint: Mapping[str, Json] = {**made_of, "similarity": name, **fields}
        self.folder = artifact_dir(home.parent, home.name, self.fingerprint)

    def _fields(self, reference: Reference) -> dict[str, Any]:
        """Give what the fingerprint tells of a fit."""
        if reference.made is not None:
            return {part: reference.made[part] for part in _OWN_FIELDS if part in reference.made}
        for count, what in (
            (len(self._queries), "training queries beside those in the prompt"),
            (self._num_rows, "passages"),
        ):
            if count < _FEWEST:
                raise ConfigError(
                    f"similarity '{self.name}' is fitted to {what}, and there are {count}: give "
                    f"at least {_FEWEST}, or use --similarity dot"
                )
        queries = digest(list(self._queries))
        fields: dict[str, Any] = {
            "similarity_sample": {"size": SAMPLE, "seed": _SEED, "queries": queries}
        }
        if self._way.reads_words:
            fields["label_tokens"] = self._first_tokens(reference.words)
        return fields

    def _first_tokens(self, words: Mapping[str, str]) -> list[int]:
        firsts = AnswerWords.of(self._encoder, words).firsts
        if len(firsts) < _FEWEST:
            raise ConfigError(
                f"similarity '{self.name}' tells labels by the first tokens of their words, and "
                f"{', '.join(words.values())} all begin alike: choose others in the task's "
                "prompt_words, or use another --similarity"
            )
        return firsts

    @property
    def is_ready(self) -> bool:
        """Say whether nothing is left to measure."""
        return not self._way.is_fitted or is_finished(self.folder)

    def num_columns(self, width: int) -> int:
        """Give D, of what is compared, where states have `width` columns."""
        return width if self._tokens is None else len(self._tokens)

    def rows(self) -> Rows:
        """Give the passages whose states it has yet to measure, sorted."""
        if self.is_ready:
            return np.empty(0, dtype=np.int64)
        if self._num_rows <= SAMPLE:
            return np.arange(self._num_rows)
        drawn = np.random.default_rng(_SEED).choice(self._num_rows, SAMPLE, replace=False)
        return np.sort(drawn)

    def queries(self) -> list[Example]:
        """Give the queries whose states it has yet to measure."""
        return [] if self.is_ready else list(self._queries.values())

    def check(self) -> None:
        """Refuse to measure where only an earlier run's fingerprint is known.

        Raises:
            ArtifactError: If it is so; the folder that is missing is named.
        """
        if self._is_known and not self.is_ready:
            raise ArtifactError(
                f"{self.folder} is missing, what similarity '{self.name}' was fitted to: restore "
                "it, or give the run's train.py command again, which makes it anew"
            )

    def fit(self, bank: Bank, query_bank: Bank) -> None:
        """Measure the states of `rows` and `queries`, which are in the banks, if nobody has.

        Raises:
            ArtifactError: If what is there is damaged, or it cannot be written.
            ModelError: If the LM has no plain head, for label words.
        """
        if self._way.is_fitted:
            build_once(
                self.folder,
                stage=STAGE,
                fingerprint=self.fingerprint,
                build=lambda aside: self._measure(aside, bank, query_bank),
                verify=False,  # when it is read
            )

    def _measure(self, aside: Path, bank: Bank, query_bank: Bank) -> Mapping[str, Json]:
        words = self._word_rows() if self._way.reads_words else None
        values = Similarity(words=words).values
        rows, keys = self.rows(), np.array(list(self._queries), np.int64)
        for part, states in (("passages", bank.states(rows)), ("queries", query_bank.states(keys))):
            usual = Usual.of(values(states))
            write_array(aside / f"{part}.npy", np.stack([usual.mean, usual.spread]))
        if words is not None:
            write_array(aside / "words.npy", np.column_stack([words.weight, words.bias]))
        return {"passages": len(rows), "queries": len(keys)}

    def _word_rows(self) -> WordRows:
        """Take the label words' rows of the LM's head."""
        head = LMHead.of(self._encoder.lm).layer
        weight = head.weight[self._tokens].float()
        bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias[self._tokens]
        return WordRows(weight.cpu().numpy(), bias.float().cpu().numpy())

    @cached_property
    def similarity(self) -> Similarity:
        """Read what `fit` measured.

        Raises:
            ArtifactError: If it is not there, or damaged.
        """
        if not self._way.is_fitted:
            return PLAIN[self.name]
        read_manifest(self.folder, stage=STAGE, fingerprint=self.fingerprint)
        words = np.array(read_array(self.folder / "words.npy")) if self._tokens else None
        return Similarity(
            words=None if words is None else WordRows(words[:, :-1], words[:, -1]),
            passages=Usual(*np.array(read_array(self.folder / "passages.npy"))),
            queries=Usual(*np.array(read_array(self.folder / "queries.npy"))),
            is_unit=self._way.is_unit,
        )


def _draw_queries(examples: Sequence[Example]) -> dict[int, Example]:
    """Draw different queries, by key: whatever their order, and however often one stands there."""
    by_key = {query_key(example): example for example in examples}
    keys = np.array(sorted(by_key), np.int64)
    if len(keys) > SAMPLE:
        keys = np.sort(np.random.default_rng(_SEED).choice(keys, SAMPLE, replace=False))
    return {key: by_key[key] for key in keys.tolist()}


# Scores of candidates from their states (Guo et al. 2023, eq. 3), going once through the bank.
#
# A passage that is a candidate of many queries is read once for all of them, and shards are read in
# the order in which they lie on disk: no query fetches its own 150 states from 2,000 files.


_QUERY_BYTES = 1 << 28  # of query states: the bank is gone through once for so many queries
_NUM_PAIRS = 1 << 22  # of query and candidate, likewise: each takes some 60 bytes on the way
_BLOCK_BYTES = 1 << 25  # of passage states at a time
_PAIR_BYTES = 1 << 19  # of states on either side of a product: the processor's cache holds both

Places = npt.NDArray[np.intp]


def score_candidates(
    bank: Bank, rows: Rows, *, query_bank: Bank, query_keys: Rows, similarity: Similarity
) -> Floats:
    """Give each candidate's score: the product of its state and the query's, both changed.

    Args:
        bank: Holds the candidates' states.
        rows: Candidates, (B, K), `MISSING_ROW` where missing.
        query_bank: Holds the queries' states.
        query_keys: Queries, (B,).
        similarity: Changes the states.

    Returns:
        (B, K) float32, -inf where a candidate is missing.

    Raises:
        KeyError: If a state is missing.
        ArtifactError: If states are not what was written.
    """
    scores = np.full(rows.shape, -np.inf, dtype=np.float32)
    by_bytes = _QUERY_BYTES // (4 * max(1, query_bank.width))
    step = max(1, min(by_bytes, _NUM_PAIRS // max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        keys = query_keys[some]
        queries = similarity.of_queries(query_bank.states(keys), query_bank.norms(keys))
        scores[some] = _score(bank, rows[some], queries=queries, similarity=similarity)
    return scores


def _score(bank: Bank, rows: Rows, *, queries: Floats, similarity: Similarity) -> Floats:
    flat = rows.ravel()
    pairs = np.argsort(flat, kind="stable")  # places in `flat`, those of one passage together
    pairs = pairs[np.searchsorted(flat, MISSING_ROW, side="right", sorter=pairs) :]
    distinct, first, count = np.unique(flat[pairs], return_index=True, return_counts=True)
    scores = np.full(flat.shape, -np.inf, dtype=np.float32)
    for block in bank.blocks(distinct, rows=max(1, _BLOCK_BYTES // (4 * max(1, bank.width)))):
        at = np.searchsorted(distinct, block.keys)
        passage = np.repeat(np.arange(len(at)), count[at])
        place = pairs[_runs(first[at], count[at])]
        query = place // rows.shape[1]
        passages = similarity.of_passages(block.states, block.norms)
        scores[place] = _products(passages, passage, right=queries, right_rows=query)
    return scores.reshape(rows.shape)


def _runs(first: Places, count: Places) -> Places:
    """Give `count` numbers from each `first` on, end to end."""
    ends = np.cumsum(count)
    return np.arange(count.sum()) + np.repeat(first - ends + count, count)


def _products(left: Floats, left_rows: Places, *, right: Floats, right_rows: Places) -> Floats:
    """Give the inner products of pairs of rows, (n,), so few at a time that the cache holds them.

    A matrix product would compute all pairs, and of 500,000 passages a query has 150.
    """
    out = np.empty(len(left_rows), dtype=np.float32)
    step = max(1, _PAIR_BYTES // (4 * max(1, left.shape[1])))
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        out[part] = np.vecdot(left[left_rows[part]], right[right_rows[part]])
    return out
