"""What runs will take of a disk and of a GPU, by arithmetic; nothing is loaded but configurations.

    reading     2 x parameters x tokens
    training    6 x parameters x tokens of the segments
    hours       the sum over the share of a card's peak that was measured of it

Shares are those of one H100 (docs/performance.md): OPT-13b read a million sentences in 33 minutes,
a T5-base took 10.1 minutes for 5,000 steps of 8 examples with 16 segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Self

from pgra.data.corpus import open_corpus
from pgra.errors import PgraError, one_line, reading
from pgra.lm.base import DEPTHS
from pgra.lm.load import find_model, load_config
from pgra.methods.arguments import RunArguments
from pgra.rerank import find_reranker

# Dense bfloat16 TFLOP/s of the makers' data sheets.
CARDS = {"a6000": 155, "l40s": 362, "a100": 312, "h100": 989, "h200": 989}
_READING = 0.59
_TRAINING = 0.096
_SENTENCE = 45  # tokens
_SEGMENT = 67
_HALF = 2  # bytes of an LM's weight and of a state
_FLOAT = 4
_INDEXED = 6  # bytes: float32 in the index, float16 beside it
_GB = 1e9
_SEVERAL_DEPTHS = ("auto", "head")


@dataclass
class Cost:
    """What runs take that share their artifacts: an index and an LM's states count once.

    Attributes:
        models: Bytes by name; the hub's cache has them.
        indexes: Bytes by corpus and encoder.
        states: Bytes by bank, and operations to read them: at most, of the whole corpus.
        readers: Bytes of what training writes.
        training: Operations.
        unknown: What could not be counted, and why.
    """

    models: dict[str, float] = field(default_factory=dict)
    indexes: dict[str, float] = field(default_factory=dict)
    states: dict[str, tuple[float, float]] = field(default_factory=dict)
    readers: float = 0.0
    training: float = 0.0
    unknown: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, runs: Sequence[RunArguments]) -> Self:
        """Count the costs of runs; their corpora and configurations are read, no weights."""
        cost = cls()
        for args in runs:
            try:
                if "rerank" in args.sections and args.rerank.num_evidence:
                    cost._add_retrieval(args)
                if args.trains:
                    cost._add_reader(args)
            except PgraError as error:
                cost.unknown.add(one_line(error))
        return cost

    def _add_retrieval(self, args: RunArguments) -> None:
        corpus = str(args.corpus.sources)
        rows = len(open_corpus(args.corpus, args.runtime.artifacts_dir))
        if "dense" in args.retriever.retriever.split("+"):
            parameters, width = _model_size(args.retriever.encoder)
            self.models[args.retriever.encoder] = parameters * _FLOAT
            self.indexes[f"{corpus} {rows} {args.retriever.encoder}"] = rows * width * _INDEXED
        rerank = args.rerank
        for name in find_reranker(rerank.reranker).models(rerank, args.rerank_options):
            parameters, width = _model_size(name)
            self.models[name] = parameters * _HALF
            if rerank.reranker != "prompted":
                self.unknown.add(f"pairs that {name} reads")
                continue
            if rerank.similarity in _SEVERAL_DEPTHS:
                width *= len(DEPTHS)
            prompt = (rerank.num_exemplars, rerank.exemplars, rerank.exemplar_seed, rerank.lm_layer)
            bank = str((name, args.data.task, args.data.dataset_name, corpus, *prompt))
            cost = (rows * width * _HALF, 2.0 * parameters * rows * _SENTENCE)
            self.states[bank] = max(self.states.get(bank, cost), cost)

    def _add_reader(self, args: RunArguments) -> None:
        name = args.reader.model_name_or_path
        parameters, _ = _model_size(name)
        self.models[name] = parameters * _FLOAT
        self.readers += parameters * _FLOAT
        num_segments = 1
        if "rerank" in args.sections:
            num_segments = max(1, args.rerank.num_evidence)
        one = replace(args.training)  # with both of its batch sizes filled in
        one.share_batch(1)
        num_examples = one.max_steps * (one.total_train_batch_size or 0)
        self.training += 6.0 * parameters * max(num_examples, 0) * num_segments * _SEGMENT

    def describe(self, card: str | None) -> list[str]:
        """Say the disk in GB, and the hours of one card."""
        sizes = {
            "models": sum(self.models.values()),
            "indexes": sum(self.indexes.values()),
            "states": sum(size for size, _ in self.states.values()),
            "readers": self.readers,
        }
        parts = ", ".join(f"{name} {size / _GB:,.2f}" for name, size in sizes.items())
        lines = [f"disk, at most: {sum(sizes.values()) / _GB:,.2f} GB ({parts})"]
        if card is not None:
            peak = CARDS[card] * 1e12 * 3600
            reading = sum(flops for _, flops in self.states.values()) / _READING / peak
            training = self.training / _TRAINING / peak
            lines.append(
                f"hours of one {card}, counted, not measured: at most {reading:,.1f} for LMs to "
                f"read, {training:,.1f} to train readers"
            )
        return [*lines, *(f"not counted: {reason}" for reason in sorted(self.unknown))]


def card_here() -> str | None:
    """Return the name of the first GPU, if its peak is known."""
    import torch

    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((card for card in CARDS if card in name), None)


@cache
def _model_size(name: str) -> tuple[int, int]:
    """Return a model's parameters and its width, by its configuration."""
    import torch
    from transformers import AutoModel

    config = load_config(find_model(name))
    with reading(f"the shape of '{name}'"), torch.device("meta"):
        model = AutoModel.from_config(config)
        return model.num_parameters(), config.get_text_config().hidden_size
