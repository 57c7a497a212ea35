"""What a task's second stage will cost, before it is run: `pgra plan`.

The first stage is looked into (`pgra.retrieval.survey`), the reranker says what it will read
(`BaseReranker.cost`), and its model reads for a few seconds on the device at hand. Only the corpus
is written to disk, as by every command that opens it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pgra.lm.cost import Speed
from pgra.rerank.base import BaseReranker, Cost
from pgra.rerank.exhaustive import ExhaustiveSearch
from pgra.retrieval.survey import FirstStage, Survey

_VECTOR_BYTES = 2 + 4  # of a number: float16 shards, and FAISS' float32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A task's second stage, foreseen.

    Attributes:
        task: Its name.
        queries: How many, by split.
        first: The first stage.
        index_bytes: Of its index, or of an index of the LM's states; estimated if not built.
        cost: What the second stage will read; None where the reranker does not say.
        speed: What was measured; None without calibration.
    """

    task: str
    queries: Mapping[str, int]
    first: FirstStage
    index_bytes: int
    cost: Cost | None
    speed: Speed | None

    def seconds(self, processes: int = 1) -> float | None:
        """Predict how long the model will read, on so many devices like this one.

        Returns:
            None without calibration; 0 if nothing is left to read.
        """
        if self.cost is not None and not self.cost.to_read:
            return 0.0
        if self.cost is None or self.speed is None:
            return None
        shards = self.cost.shards
        share = math.ceil(shards / processes) / shards  # of the process with the most shards
        reading = self.cost.reading.tokens / self.speed.tokens_per_second
        return self.speed.load_seconds + share * reading


def make_plan(
    survey: Survey, reranker: BaseReranker, search: ExhaustiveSearch | None = None
) -> Plan:
    """Foresee what the second stage will cost.

    Args:
        survey: The first stage, the task's queries, and for how many seconds models run to measure
            speed; 0 runs none and predicts no time.
        reranker: The second stage.
        search: The search that takes the first stage's place, if one does.

    Raises:
        PgraError: As the stages themselves would.
    """
    if search is not None:  # refused as when it is searched
        search.check()
    first = survey.run()
    index_bytes = first.index_bytes or len(survey.request.corpus) * first.width * _VECTOR_BYTES
    examples = [example for split in survey.splits.values() for example in split]
    cost = reranker.cost(examples, first)
    measures = cost is not None and cost.to_read and survey.seconds > 0
    return Plan(
        task=survey.task,
        queries={split: len(examples) for split, examples in survey.splits.items()},
        first=first,
        index_bytes=index_bytes if search is None else search.index_bytes,
        cost=cost,
        speed=cost.trial(survey.seconds) if cost is not None and measures else None,
    )
