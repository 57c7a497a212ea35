"""Evidence of a wanted label consistency: how a reader answers to it (docs/worth.md).

No first stage that one could have: it looks at a query's true label. So an accuracy under it is
no system's, but says what evidence of that consistency would be worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from pgra.config import Arguments as _Arguments
from pgra.config import arg
from pgra.core import Candidates, Example
from pgra.errors import ConfigError, DataError
from pgra.experiments.consistency import Labeler, label_texts, open_labeler, sample_corpora
from pgra.retrieval.base import IndexIdentity, IndexRequest, Retriever, check_num_candidates


@dataclass(kw_only=True)
class DoseArguments(_Arguments):
    """How consistent evidence shall be, and who says so."""

    dose: float = arg(1.0, "Chance that evidence has the true label of its query.", least=0, most=1)
    dose_labeler: str = arg(
        "",
        "A finished run of --num_evidence 0 on this task: it labels passages, centred at its "
        "medians over the corpus.",
        must_be_given=True,
    )


class DoseRetriever(Retriever):
    """Draws passages that have a query's true label with a given chance, else another label.

    What has it under one dose has it under every larger one.
    """

    Arguments = DoseArguments

    def __init__(self, labels: Sequence[str], dose: float) -> None:
        """Remember the pseudo-label of each passage, in the corpus' order."""
        self._labels, self._dose = np.array(labels), dose

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Label the whole corpus, unless it was labelled before."""
        options, labeler = _read(request)
        texts = request.corpus.texts(np.arange(len(request.corpus)))
        known = label_texts(
            labeler,
            list(dict.fromkeys(texts)),
            request.context.artifacts / "pseudo_labels",
            sample=sample_corpora([request.corpus]),
            device=request.context.device,
        )
        self = cls([known.labels[text] for text in texts], options.dose)
        self.fingerprint = cls.identify(request).fingerprint
        return self

    @classmethod
    def identify(cls, request: IndexRequest) -> IndexIdentity:
        """Return what decides the draw; there is no index."""
        options, labeler = _read(request)
        drawn = {"dose": options.dose, "dose_labeler": labeler.checksum}
        return IndexIdentity({**request.corpus.fingerprint, **drawn})

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Refuse: a text alone has no true label."""
        raise ConfigError(
            f"{len(queries)} texts have no label, and this retriever looks at it ({k} passages "
            "each): it finds evidence of a task's examples alone"
        )

    def for_examples(self, examples: Sequence[Example], k: int) -> Candidates:
        """Draw k different passages for each example, seeded by its text alone: (B, k), unordered.

        Raises:
            ConfigError: If k exceeds the corpus, or an example has no label.
            DataError: If fewer than k passages have an example's label, or another.
        """
        check_num_candidates(k, len(self._labels))
        rows = np.empty((len(examples), k), np.int64)
        for example, row in zip(examples, rows, strict=True):
            if example.label is None:
                self.retrieve([example.text], k)
            has_it = self._labels == example.label
            least = min(has_it.sum(), (~has_it).sum())
            if least < k:
                raise DataError(
                    f"{k} passages a query are to be drawn of label '{example.label}' or of the "
                    f"others, and of one of these the corpus has {least}: lower --num_candidates, "
                    "or search a larger corpus"
                )
            draw = np.random.default_rng(xxhash.xxh3_64_intdigest(example.text.encode()))
            same, other = (draw.permutation(np.flatnonzero(mask))[:k] for mask in (has_it, ~has_it))
            row[:] = np.where(draw.random(k) < self._dose, same, other)
        return Candidates(rows, np.zeros(rows.shape, np.float32))


def _read(request: IndexRequest) -> tuple[DoseArguments, Labeler]:
    assert isinstance(request.options, DoseArguments)
    return request.options, open_labeler(Path(request.options.dose_labeler))
