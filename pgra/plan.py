"""What a task's second stage will cost, before it is run: `pgra plan`.

The first stage is looked into (`pgra.retrieval.survey`), the reranker says what it will read
(`Reranker.cost`), and its model reads for a few seconds on the device at hand. Only the corpus is
written to disk, as by every command that opens it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pgra.config import PgraArguments
from pgra.core import ALONE
from pgra.errors import ConfigError
from pgra.lm.cost import Speed
from pgra.methods.base import SPLITS
from pgra.methods.stages import Stages
from pgra.rerank.base import Cost
from pgra.rerank.exhaustive import open_exhaustive
from pgra.retrieval import IndexRequest
from pgra.retrieval.survey import FirstStage, Survey

_VECTOR_BYTES = 2 + 4  # of a number: float16 shards, and FAISS' float32


@dataclass(frozen=True)
class Plan:
    """A task's second stage, foreseen.

    Attributes:
        task: Its name.
        reranker: As the user named it.
        queries: How many, by split.
        first: The first stage.
        index_bytes: Of its index, or of an index of the LM's states; estimated if not built.
        cost: What the second stage will read; None where the reranker does not say.
        speed: What was measured; None without calibration.
    """

    task: str
    reranker: str
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
        share = -(-shards // processes) / shards  # of the process with the most shards
        reading = self.cost.reading.tokens / self.speed.tokens_per_second
        return self.speed.load_seconds + share * reading


def make_plan(args: PgraArguments, *, seconds: float = 10.0) -> Plan:
    """Foresee what the second stage will cost.

    Args:
        args: As for the run itself.
        seconds: How long the model reads to measure its speed; 0 runs none and predicts no time.

    Raises:
        ConfigError: If the arguments leave the reranker nothing to do.
        PgraError: As the stages themselves would.
    """
    if args.rerank.num_evidence == 0 or args.rerank.reranker == "none":
        raise ConfigError(
            "the LM has nothing to read with --num_evidence 0 or --reranker none: "
            "plan a run with --reranker prompted"
        )
    found = Stages.read(args, ALONE)
    found.open()
    states_bytes = None
    if args.is_exhaustive:  # refused as when it is searched
        search = open_exhaustive(
            found.reranker,
            factory=args.retriever.index_factory,
            memory_gb=args.retriever.index_memory_gb,
        )
        search.check()
        states_bytes = search.index_bytes
    splits = {split: found.data.examples(split) for split in SPLITS}
    request = IndexRequest(
        args=args.retriever,
        corpus=found.corpus,
        context=replace(found.context, progress=False),
        options=args.retriever_options,
    )
    task = found.data.task.name
    first = Survey(request=request, task=task, splits=splits, seconds=seconds).run()
    examples = [example for split in splits.values() for example in split]
    cost = found.reranker.cost(examples, first)
    measures = cost is not None and cost.to_read and seconds > 0
    index_bytes = first.index_bytes or len(found.corpus) * first.width * _VECTOR_BYTES
    return Plan(
        task=task,
        reranker=args.rerank.reranker,
        queries={split: len(examples) for split, examples in splits.items()},
        first=first,
        index_bytes=index_bytes if states_bytes is None else states_bytes,
        cost=cost,
        speed=cost.trial(seconds) if cost is not None and measures else None,
    )
