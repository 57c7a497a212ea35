"""Nearest labelled examples, and the leak guard that excludes a query's own text.

Texts are compared by the inner products of their vectors: by cosine, unless `--normalize false`.
Guo et al. 2023 (section 3.1, baseline 3) vote with the vectors of a T5's encoder; Liu et al. 2022
(KATE, section 2.3) choose exemplars with a sentence encoder's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pgra.arrays import Counts, Rows, Vectors
from pgra.artifacts import artifact_dir, build_once, digest, read_array, write_array
from pgra.data.text import LEAK_JACCARD, copy_key, text_key
from pgra.encoders import as_encoder
from pgra.errors import ModelError
from pgra.retrieval.base import RetrieverArguments, examples_digest
from pgra.types import MISSING_ROW, Candidates, Example, Fields

if TYPE_CHECKING:
    from pgra.encoders.encoder import Encoder

# The leak guard: a query, and what is nearly the same text, is never its own exemplar.
#
# Public sets hold texts twice, in one split or in both: 731 of SST-2's 872 test sentences stand in
# MR's training set. The nearest neighbor of such a query is itself, and brings its own label.
#
# Two texts are nearly the same if they share 0.9 of their words (Jaccard). One word is more than
# a tenth of a short text, so they are the same too if, with or without articles and words of
# courtesy, they differ in spaces or in one misspelt word alone: one edit in a word of five
# letters or more, or two letters swapped, where one of the two words stands in at most one text
# of the collection.


# Returns each query's nearest, (B, depth): rows of the collection, each text once.
Search = Callable[[int], Candidates]

LEAK_RULE = 3  # for fingerprints: results of an older rule are not reused

_DEEPER = 4
_FILLERS = frozenset({"a", "an", "the", "kindly", "please", "pls", "thanks"})
_LONG_WORD = 5  # in shorter ones a letter makes another word: Iran, Iraq


class LeakGuard:
    """Decides which texts of a collection must not be shown with a query."""

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[str | None] | None = None,
        *,
        jaccard: float | None = LEAK_JACCARD,
    ) -> None:
        """Remember a collection of n texts, in the order of its rows.

        Args:
            texts: The collection.
            labels: Equal texts with other labels are no copies; None where there are no labels.
            jaccard: Words in common over all words of either text (as sets). From this share on
                they are nearly the same; 1: they have the same words; None: no text is excluded,
                not even a query's own.
        """
        self.jaccard = jaccard
        self._texts = texts
        self._labels = [None] * len(texts) if labels is None else labels
        self._words: dict[int, list[str]] = {}

    @cached_property
    def distinct(self) -> Rows:
        """The first row of each text and label, in order: a prompt shows no copies."""
        firsts: dict[tuple[str, str | None], int] = {}
        for row, (text, label) in enumerate(zip(self._texts, self._labels, strict=True)):
            firsts.setdefault((copy_key(text), label), row)
        return np.fromiter(firsts.values(), dtype=np.int64)

    def leaks(self, query: str) -> Callable[[int], bool]:
        """Return a function that decides whether a row is the query's text, or nearly."""
        jaccard = self.jaccard
        if jaccard is None:
            return lambda _: False
        words = text_key(query).split()
        distinct = frozenset(words)
        content = _content(words)

        def is_leak(row: int) -> bool:
            others = self._words_of(row)
            return (
                len(distinct.intersection(others)) >= jaccard * len(distinct.union(others))
                or self._is_respelt(words, others)
                or self._is_respelt(content, _content(others))
            )

        return is_leak

    def _words_of(self, row: int) -> list[str]:
        if row not in self._words:
            self._words[row] = text_key(self._texts[row]).split()
        return self._words[row]

    @cached_property
    def _num_texts(self) -> Counter[str]:
        """The number of texts that contain each word."""
        counts: Counter[str] = Counter()
        for row in range(len(self._texts)):
            counts.update({*self._words_of(row)})
        return counts

    def _is_respelt(self, words: Sequence[str], others: Sequence[str]) -> bool:
        """Return whether two texts differ in spaces, or in one misspelt word alone."""
        if "".join(words) == "".join(others):
            return True
        if len(words) != len(others):
            return False
        pairs = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
        if len(pairs) != 1 or not _is_one_slip(*pairs[0]):
            return False
        return min(self._num_texts[word] for word in pairs[0]) <= 1

    def nearest(
        self, search: Search, queries: Sequence[str], k: int, *, depth: int | None = None
    ) -> tuple[Candidates, Counts]:
        """Return each query's nearest that may be shown with it, and how many were excluded.

        The nearest are (B, k), best first, missing where a query has fewer; the numbers (B,)
        are of those that would have been among them. `search` finds `distinct` rows, at first
        `depth` of them (None: k + 1), then more where needed.
        """
        most = len(self.distinct)
        depth = min(most, k + 1 if depth is None else depth)
        while True:
            hits = search(depth)
            nearest = Candidates.missing(len(queries), k)
            dropped = np.zeros(len(queries), dtype=np.int64)
            for line, query in enumerate(queries):
                is_leak = self.leaks(query)
                count = 0
                for rank, row in enumerate(hits.rows[line].tolist()):
                    if row == MISSING_ROW or count == k:
                        break
                    if is_leak(row):
                        dropped[line] += 1
                        continue
                    nearest.rows[line, count] = row
                    nearest.scores[line, count] = hits.scores[line, rank]
                    count += 1
            is_short = (nearest.rows == MISSING_ROW).any(axis=1)
            has_more = (hits.rows != MISSING_ROW).all(axis=1)  # BM25 finds no row without a word
            if depth == most or not (is_short & has_more).any():
                return nearest, dropped
            depth = min(most, _DEEPER * depth)


def _content(words: Sequence[str]) -> Sequence[str]:
    return [word for word in words if word not in _FILLERS] or words


def _is_one_slip(word: str, other: str) -> bool:
    from rapidfuzz.distance import OSA

    # What has no upper case may be a script without spaces, where a "word" is a whole text.
    if not all(text.isalpha() and text != text.upper() for text in (word, other)):
        return False
    is_swap = sorted(word) == sorted(other)
    is_long = max(len(word), len(other)) >= _LONG_WORD
    return (is_long or is_swap) and OSA.distance(word, other, score_cutoff=1) == 1


def open_neighbor_encoder(args: RetrieverArguments, reader: str, device: str) -> "Encoder":
    """Open what examples are compared by: the encoder, or that of the untrained T5 `reader`.

    A vector of the T5's is the mean of its last states (Guo et al. 2023), in float32: a T5
    overflows in float16. ModelError if `reader` is no T5.
    """
    if args.neighbor_encoder == "encoder":
        return as_encoder(args, device=device)
    args = replace(args, encoder=reader, pooling="mean", encoder_dtype="float32", query_prompt=None)
    encoder = as_encoder(args, device=device)
    if not hasattr(encoder.model.config, "relative_attention_num_buckets"):
        raise ModelError(f"'{reader}' is not a T5: use --neighbor_encoder encoder, or a T5")
    return encoder


class Neighbors:
    """Labelled `examples`, and their vectors, made once and kept."""

    def __init__(
        self,
        open_encoder: Callable[[], "Encoder"],
        examples: Sequence[Example],
        root: Path | None,
    ) -> None:
        """Remember what is compared; the encoder is opened when it is first needed.

        With a `root`, the folder of the task's neighbors, vectors are kept there. With None they
        are kept in memory alone, and the collection may grow at its end.
        """
        self.examples = examples
        self._open = open_encoder
        self._root = root
        self._vectors: Vectors | None = None

    @cached_property
    def encoder(self) -> "Encoder":
        """What texts are compared by, opened on first use."""
        return self._open()

    @property
    def fingerprint(self) -> Fields:
        """Fingerprint of encoder and labelled examples."""
        return {
            "encoder": dict(self.encoder.query_fingerprint),
            "training_examples": examples_digest(self.examples),
            "labels": digest([example.label for example in self.examples]),
        }

    def vectors(self) -> Vectors:
        """Encode the collection, or read its vectors: (n, D) float32."""
        vectors = self._vectors
        if vectors is not None and (self._root or len(vectors) == len(self.examples)):
            return vectors
        if self._root is None:
            count = 0 if vectors is None else len(vectors)
            new = self.encoder.encode_examples(self.examples[count:])
            self._vectors = new if vectors is None else np.concatenate([vectors, new])
            return self._vectors
        made_of = dict(self.fingerprint)
        del made_of["labels"]

        def build(folder: Path) -> Fields:
            write_array(folder / "vectors.npy", self.encoder.encode_examples(self.examples))
            return {"examples": len(self.examples)}

        folder = artifact_dir(self._root, "vectors", made_of)
        build_once(
            folder,
            stage="example vectors",
            fingerprint=made_of,
            build=build,
            inputs=[self.encoder.inputs],
        )
        self._vectors = np.asarray(read_array(folder / "vectors.npy"))
        return self._vectors
