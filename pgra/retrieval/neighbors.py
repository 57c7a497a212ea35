"""Nearest labelled examples: what the k-NN vote and KATE's exemplars have in common.

Texts are compared by the inner products of their vectors: by cosine, with `--normalize false` by
the product itself. Guo et al. 2023 (section 3.1, baseline 3) vote with the vectors of a T5's
encoder; Liu et al. 2022 (KATE, section 2.3) choose exemplars with a sentence encoder's.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from pgra.config import RetrieverArguments
from pgra.io import (
    artifact_dir,
    digest,
    is_finished,
    read_array,
    read_manifest,
    write_array,
    write_manifest,
)
from pgra.models.encoder import Encoder
from pgra.models.sentence import DEFAULT_MAX_TOKENS
from pgra.models.t5_encoder import load_t5_encoder
from pgra.processes import Processes
from pgra.retrieval.dense import load_encoder
from pgra.retrieval.exact import Vectors, nearest
from pgra.retrieval.leaks import LeakGuard
from pgra.retrieval.store import examples_digest
from pgra.types import Candidates, Example, Json, Rows

logger = logging.getLogger(__name__)

_STAGE = "example vectors"


class ExampleEncoder(Protocol):
    """What examples are compared by: a text encoder, or an LM under a prompt."""

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """Give all that determines an example's vector, besides the example."""
        ...

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Give the vectors of examples, (B, D) float32, in their order."""
        ...


def open_neighbor_encoder(args: RetrieverArguments, reader: str, device: str) -> Encoder:
    """Open what examples are compared by: `neighbor_encoder` says which of the two.

    Args:
        args: The first stage's encoder, and how vectors are made.
        reader: The T5, whose untrained encoder is the other choice.
        device: Where it runs.

    Raises:
        ModelError: If it cannot be found or loaded, or is no encoder.
    """
    if args.neighbor_encoder == "encoder":
        return load_encoder(args, device)
    return load_t5_encoder(
        reader,
        normalize=args.normalize,
        max_tokens=args.max_encoder_tokens or DEFAULT_MAX_TOKENS,
        device=device,
        batch_tokens=args.encoder_batch_tokens,
    )


class Neighbors:
    """A collection of labelled examples, searched by vectors that are made once and kept.

    Attributes:
        examples: The collection, n examples.
    """

    def __init__(
        self, open_encoder: Callable[[], ExampleEncoder], examples: Sequence[Example], root: Path
    ) -> None:
        """Remember what is to be searched; nothing is loaded yet.

        Args:
            open_encoder: Loads what texts are compared by, when it is first needed.
            examples: The collection, in the file's order.
            root: Folder of the task's neighbors.
        """
        self.examples, self._open, self._root = examples, open_encoder, root
        self._vectors: Vectors | None = None

    @cached_property
    def encoder(self) -> ExampleEncoder:
        """Load what texts are compared by.

        Raises:
            ModelError: If it cannot be.
        """
        return self._open()

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that decides who is near whom, and under which label."""
        return {
            "encoder": dict(self.encoder.query_fingerprint),
            "training_examples": examples_digest(self.examples),
            "labels": digest([example.label for example in self.examples]),
        }

    def vectors(self, processes: Processes = Processes()) -> Vectors:  # noqa: B008 (frozen)
        """Encode the collection, or read the vectors that are there: (n, D) float32.

        Args:
            processes: Who waits while the main one encodes.

        Raises:
            ArtifactError: If what is there is damaged.
        """
        if self._vectors is None:
            self._vectors = self._read_or_encode(processes)
        return self._vectors

    def _read_or_encode(self, processes: Processes) -> Vectors:
        fields: dict[str, Json] = {
            name: value for name, value in self.fingerprint.items() if name != "labels"
        }
        folder = artifact_dir(self._root, "vectors", fields)
        is_there = is_finished(folder)
        processes.barrier()  # all have looked before the main process writes
        if not is_there and processes.worker.is_main:
            start = time.perf_counter()
            write_array(folder / "vectors.npy", self.encode(self.examples))
            seconds = time.perf_counter() - start
            counts = {"examples": len(self.examples)}
            write_manifest(folder, stage=_STAGE, fingerprint=fields, counts=counts, seconds=seconds)
        processes.barrier()
        read_manifest(folder, stage=_STAGE, fingerprint=fields)
        return np.asarray(read_array(folder / "vectors.npy"))

    def encode(self, examples: Sequence[Example]) -> Vectors:
        """Give the vectors of any examples, (B, D): all are queries, being texts of one kind."""
        return self.encoder.encode_examples(examples)

    def nearest(
        self,
        queries: Sequence[Example],
        count: int,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
    ) -> Candidates:
        """Give each query's nearest of the collection, (B, count), nearest first.

        A query that stands in the collection is its own nearest: see `nearest_others`.
        """
        vectors = self.vectors(processes)
        rows = np.arange(len(vectors), dtype=np.int64)
        return nearest(self.encode(queries), [(rows, vectors)], count)

    def nearest_others(
        self,
        queries: Sequence[Example],
        count: int,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
    ) -> Rows:
        """Give each query's nearest examples that have another text, nearest first.

        So a training query is never its own neighbor, nor is a copy of it or what is nearly one
        (`LeakGuard`): it would bring the query's own label. Of copies of each other, text and
        label, only the first in the collection is found.

        Args:
            queries: B examples, of the collection or not.
            count: How many.
            processes: Who waits while the main one encodes the collection.

        Returns:
            (B, count), `MISSING_ROW` where there are fewer other texts.
        """
        vectors, guard = self.vectors(processes), self._guard
        block = (guard.distinct, vectors[guard.distinct])
        asked = self.encode(queries)
        allowed = guard.nearest(
            lambda depth: nearest(asked, [block], depth),
            [query.text for query in queries],
            count,
        )
        logger.info(
            "neighbors: %d of %d queries have a copy of their text, or nearly one, in the "
            "collection of %d texts, which was left out",
            int((allowed.num_dropped > 0).sum()),
            len(queries),
            len(guard.distinct),
        )
        return allowed.candidates.rows

    @cached_property
    def _guard(self) -> LeakGuard:
        labels = [example.label for example in self.examples]
        return LeakGuard([example.text for example in self.examples], labels)
