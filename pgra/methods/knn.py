"""`--method knn`: the label that most of a query's nearest training examples have.

Guo et al. 2023, section 3.1, baseline 3: "a majority vote based on distances between embeddings",
those of the T5's encoder (`--neighbor_encoder reader`); neither pooling, distance nor the number of
neighbors is stated. Here vectors are means of the last states, compared by cosine (with
`--normalize false` by inner product), and the dev set chooses the number.

Ties of the vote go to the tied label with the nearest neighbor; equally near neighbors are in the
order of the training file.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from pgra.arrays import Rows
from pgra.errors import ConfigError
from pgra.exemplars.selection import VectorSimilarity, vote
from pgra.methods.arguments import METHODS, RunArguments
from pgra.methods.base import Decisions, Method
from pgra.methods.stages import Stages
from pgra.retrieval.neighbors import Neighbors, open_neighbor_encoder
from pgra.types import Example, Json

NUMBERS = (1, 3, 5, 9, 17, 33, 65)  # tried on the dev set; odd, so that two labels cannot tie


class NearestNeighbors(Method):
    """Lets each query's nearest training examples vote."""

    SECTIONS = METHODS["knn"].sections

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:  # noqa: ARG003 (the contract's)
        return False

    def open(self) -> None:
        """Read the task; refuse more neighbors than there are training examples."""
        stages = Stages.read(self.args, self.context, self.reranker)
        self.data = stages.data.labelled()
        self.fingerprints = stages.fingerprints
        args = self.args["retriever"]
        train = self.data.train
        number = args.num_neighbors
        if number is not None and number > len(train):
            raise ConfigError(f"num_neighbors ({number}) exceeds {len(train)} training examples")
        self.numbers = [n for n in NUMBERS if n <= len(train)] if number is None else [number]
        reader = self.args.reader.model_name_or_path
        neighbors = Neighbors(
            partial(open_neighbor_encoder, args, reader, self.context.device),
            train,
            self.context.artifacts / "neighbors" / self.data.task.name,
        )
        self.similarity = VectorSimilarity(neighbors, "dot")

    def identity(self) -> dict[str, Json]:
        encoder = dict(self.similarity.neighbors.encoder.query_fingerprint)
        return {"num_neighbors": self.numbers, "encoder": encoder}

    @classmethod
    def sources(cls, args: RunArguments) -> list[tuple[str, str]]:
        by_reader = args.retriever.neighbor_encoder == "reader"
        model = args.reader.model_name_or_path if by_reader else args.retriever.encoder
        return [*super().sources(args), ("model", model)]

    def fit(self, folder: Path) -> Mapping[str, Json] | None:  # noqa: ARG002
        """Choose the number of neighbors that is best on the dev set; of equals the smallest."""
        self.best = self.numbers[0]
        if len(self.numbers) == 1:
            return None
        rows = self._nearest(self.data.dev)
        metric = self.data.metric
        values = {}
        for number in self.numbers:
            decided = [next(iter(shares)) for shares in self._votes(rows, number)]
            values[number] = self.data.measure_dev(decided)[metric]
        self.best = max(self.numbers, key=lambda number: values[number])
        return {"metric": metric, "value": values[self.best], "num_neighbors": self.best}

    def decide(self, examples: Sequence[Example]) -> Decisions:
        votes = self._votes(self._nearest(examples), self.best)
        predictions = [
            self.data.make_prediction(query, next(iter(shares)), shares)
            for query, shares in zip(examples, votes, strict=True)
        ]
        tried = ", ".join(map(str, self.numbers))
        note = f"{self.best} neighbors vote, of {tried}; ties go to the label of the nearest"
        return Decisions(predictions, notes=[note])

    def _votes(self, rows: Rows, number: int) -> list[dict[str, float]]:
        """Return the shares of the first so many neighbors' labels, each query's winner first."""
        train = self.data.train
        return [vote([str(train[row].label) for row in line]) for line in rows[:, :number].tolist()]

    def _nearest(self, examples: Sequence[Example]) -> Rows:
        """Return the nearest training examples, (B, k), nearest first."""
        with self.timed("neighbors"):
            every = np.arange(len(self.data.train))
            return self.similarity.nearest(examples, every, self.numbers[-1]).rows
