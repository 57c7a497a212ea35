"""`--system knn`: the label that most of a query's nearest training examples have.

Guo et al. 2023, section 3.1, baseline 3: "a majority vote based on distances between embeddings",
those of the T5's encoder (`--neighbor_encoder reader`); neither pooling, distance nor the number of
neighbors is stated. Here vectors are means of the last states, compared by cosine (with
`--normalize false` by inner product), and the number is what suits the dev set best.

Ties of the vote go to the tied label whose neighbor is nearest; equally near neighbors stand in the
order of the training file.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pgra.artifacts import digest
from pgra.config import PgraArguments
from pgra.core import ALONE, Context, Json, Prediction, Rows
from pgra.errors import ConfigError
from pgra.methods.pgra import neighbor_model, open_neighbors, read_task
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.report.metrics import measure
from pgra.retrieval.base import examples_digest, store_candidates
from pgra.retrieval.neighbors import Neighbors
from pgra.run_folder import Found, timed
from pgra.runs import Decisions, Outcome, run_untrained

logger = logging.getLogger(__name__)

NUMBERS = (1, 3, 5, 9, 17, 33, 65)
"""How many neighbors are tried on the dev set; odd, so that two labels cannot tie."""


def run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    context: Context = ALONE,
) -> Outcome:
    """Decide the test examples by their nearest training examples, or take up what is there.

    Args:
        args: Task and encoder; `num_neighbors` None tries `NUMBERS` on the dev set.
        training: Its `output_dir` is the run.
        context: Who waits: the main one encodes.

    Raises:
        ArtifactError: If the folder holds another run.
        ConfigError: If more neighbors are asked for than there are training examples.
        PgraError: As `read_task` and the encoder.
    """
    found = read_task(args)
    asked, count = args.retriever.num_neighbors, len(found.splits.train)
    if asked is not None and asked > count:
        raise ConfigError(
            f"num_neighbors ({asked}) exceeds the {count} training examples: lower it"
        )
    nearest = open_neighbors(found.task, found.splits, args)
    numbers = [number for number in NUMBERS if number <= count] if asked is None else [asked]
    settings: Mapping[str, Json] = {
        "num_neighbors": numbers,
        "encoder": dict(nearest.encoder.query_fingerprint),
    }
    neighborhood = Neighborhood(args, found, nearest, numbers[-1], context)
    return run_untrained(
        args,
        training,
        found,
        lambda: _decide(found, neighborhood, numbers),
        settings=settings,
        models=[neighbor_model(args)],
        context=context,
    )


@dataclass(frozen=True)
class Votes:
    """What neighbors say of B examples.

    Attributes:
        shares: Share of the votes, (B, C) float64.
        decided: The winning label's column, (B,).
    """

    shares: npt.NDArray[np.float64]
    decided: npt.NDArray[np.int64]


def vote(rows: Rows, columns: npt.NDArray[np.int64], num_labels: int) -> Votes:
    """Let neighbors vote, each as much as the others.

    Args:
        rows: Training examples, (B, k), nearest first.
        columns: The label's column of each training example, (n,).
        num_labels: C.
    """
    heard = columns[rows]  # (B, k)
    votes = (heard[:, :, None] == np.arange(num_labels)).sum(axis=1)  # (B, C)
    is_top = votes == votes.max(axis=1, keepdims=True)
    # The nearest neighbor among those whose label has the most votes.
    place = np.take_along_axis(is_top, heard, axis=1).argmax(axis=1)
    decided = np.take_along_axis(heard, place[:, None], axis=1)[:, 0]
    return Votes(votes / rows.shape[1], decided)


@dataclass(frozen=True)
class Neighborhood:
    """Nearest training examples of a split's, stored once for all that share them.

    Attributes:
        args: Where products go.
        found: The task's examples.
        nearest: The training examples, and what they are compared by.
        num_neighbors: How many are looked up.
        context: Who waits.
    """

    args: PgraArguments
    found: Found
    nearest: Neighbors
    num_neighbors: int
    context: Context

    def of(self, split: str) -> Rows:
        """Give the training examples next to each of a split's, (B, k), nearest first."""
        fields = {
            "encoder": dict(self.nearest.encoder.query_fingerprint),
            "training_examples": examples_digest(self.found.splits.train),
            "queries": examples_digest(self.found.examples(split)),
            "num_neighbors": self.num_neighbors,
        }
        examples = self.found.examples(split)
        with timed(self.found, f"neighbors of {split}"):
            self.nearest.vectors(self.context)
            stored = store_candidates(
                self.args.artifacts / "neighbors" / self.found.task.name,
                split,
                fields,
                lambda: self.nearest.nearest(examples, self.num_neighbors),
                stage="neighbors",
                context=self.context,
            )
        self.found.fingerprints[f"neighbors/{split}"] = digest(fields)
        return stored.candidates.rows


def _decide(found: Found, neighborhood: Neighborhood, numbers: Sequence[int]) -> Decisions:
    labels, metric = list(found.task.labels), found.task.metric
    columns = np.array([labels.index(str(e.label)) for e in found.splits.train], dtype=np.int64)
    best, dev, told = numbers[0], {}, "as asked for"
    if len(numbers) > 1:
        rows = neighborhood.of("dev")
        truth = [str(example.label) for example in found.splits.dev]
        values = {}
        for number in numbers:
            decided = vote(rows[:, :number], columns, len(labels)).decided
            values[number] = measure(metric, truth, [labels[i] for i in decided], labels)[metric]
        best = max(numbers, key=lambda number: values[number])  # max keeps the first of equals
        dev = {"metric": metric, "value": values[best], "num_neighbors": best}
        told = f"best of {', '.join(map(str, numbers))} on the dev set"
    logger.info("knn: %d neighbors, %s", best, told)
    votes = vote(neighborhood.of("test")[:, :best], columns, len(labels))
    notes = [
        f"{best} neighbors vote, {told}; ties go to the tied label with the nearest neighbor",
        "the seed decides nothing here: nothing is drawn, nothing is trained",
    ]
    return Decisions(_predictions(found, votes), notes, dev)


def _predictions(found: Found, votes: Votes) -> list[Prediction]:
    labels = found.task.labels
    return [
        Prediction(example.id, labels[column], dict(zip(labels, map(float, shares), strict=True)))
        for example, column, shares in zip(
            found.examples("test"), votes.decided, votes.shares, strict=True
        )
    ]
