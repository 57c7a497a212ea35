"""A trained reader, used: queries and evidence in, labels out. It needs its folder and no more."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from pgra.data.textfile import is_utf8
from pgra.errors import ConfigError
from pgra.models.fid import FusionReader
from pgra.models.loading import choose_device, find_model, load_tokenizer
from pgra.models.segments import PackedSegments
from pgra.reader.attention import score_with_attention
from pgra.reader.inputs import build_inputs
from pgra.reader.predict import batch_tokens_on, map_batches, predict
from pgra.reader.queries import Query, read_queries
from pgra.reader.record import ReaderRecord, check_reads_any, find_reader, read_record
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Example, Prediction

Evidence = Sequence[Sequence[str]]
"""Texts for each query."""


class Reader:
    """A trained reader.

    Attributes:
        record: What it was trained for and with.
        model: The T5 that reads.
        tokenizer: Its tokenizer.
    """

    def __init__(self, record: ReaderRecord, model: FusionReader, tokenizer: Any) -> None:
        self.record, self.model, self.tokenizer = record, model, tokenizer
        self._batch_tokens = batch_tokens_on(model.device)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> Self:
        """Load a reader: neither data nor corpus is needed, and the folder may have been moved.

        Args:
            folder: A finished run, or its `reader/`.
            device: "auto" (a GPU if there is one), "cpu", "cuda", ...

        Raises:
            ArtifactError: If there is no whole reader, or it is damaged or of another format.
            ModelError: If it cannot be loaded, or there is no such device.
        """
        place = choose_device(device)
        record, home = read_record(Path(folder)), find_reader(Path(folder))
        check_reads_any(record)
        tokenizer = load_tokenizer(find_model(str(home)))
        model = FusionReader.from_name(str(home))
        model.to(place)
        return cls(record, model, tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        """Give the task's labels, in its order."""
        return self.record.labels

    @property
    def temperature(self) -> float:
        """Give what scores are divided by before the softmax over labels."""
        return self.record.calibration.temperature

    @property
    def num_evidence(self) -> int:
        """Give how much evidence a query had in training; 0 for a plain T5."""
        return self.record.num_evidence

    def predict(
        self,
        queries: Sequence[Query],
        evidence: Evidence | None = None,
        *,
        progress: bool = False,
    ) -> list[Prediction]:
        """Decide each query, with calibrated probabilities.

        Args:
            queries: Texts, or mappings of the task's inputs to texts.
            evidence: Texts for each query, in any order and of any number; `[]` for no evidence at
                all.
            progress: Whether to show a bar.

        Raises:
            ConfigError: If a query is not what the task takes, or a reader that was trained with
                evidence is given none and `[]` does not say that this is meant.
        """
        return predict(
            self.model,
            self.tokenizer,
            self._inputs(queries, evidence),
            self.record.verbalizer,
            decision=self.record.decision,
            batch_tokens=self._batch_tokens,
            progress=progress,
        )

    def attention(
        self, queries: Sequence[Query], evidence: Evidence | None = None
    ) -> list[list[float]]:
        """Say what the reader looks at while it writes the label it decides for.

        Args:
            queries: As in `predict`.
            evidence: As in `predict`.

        Returns:
            For each query a share of the cross-attention for each evidence; they add up to 1. A
            query without evidence has none.
        """
        shares = score_with_attention(
            self.model,
            self.tokenizer,
            self._inputs(queries, evidence),
            self.record.verbalizer,
            decision=self.record.decision,
            batch_tokens=self._batch_tokens,
        ).shares
        found = evidence or [[] for _ in queries]
        return [part if texts else [] for part, texts in zip(shares, found, strict=True)]

    def generate(
        self,
        queries: Sequence[Query],
        evidence: Evidence | None = None,
        *,
        max_new_tokens: int = 32,
        **options: Any,
    ) -> list[str]:
        """Write text freely, whatever the labels are.

        Args:
            queries: As in `predict`.
            evidence: As in `predict`.
            max_new_tokens: Most tokens of a text.
            **options: As `transformers.GenerationMixin.generate` takes them (`num_beams`,
                `do_sample`, ...).
        """

        def work(_: list[int], packed: PackedSegments) -> list[str]:
            written = self.model.generate(packed, max_new_tokens=max_new_tokens, **options)
            texts = self.tokenizer.batch_decode(written.cpu(), skip_special_tokens=True)
            return [text.strip() for text in texts]

        with torch.inference_mode():
            return map_batches(
                self.model,
                self._inputs(queries, evidence),
                work,
                pad_token_id=self.tokenizer.pad_token_id,
                batch_tokens=self._batch_tokens,
            )

    def examples(self, queries: Sequence[Query]) -> list[Example]:
        """Give queries the task's fields.

        Raises:
            ConfigError: If one is not what the task takes.
        """
        return read_queries(queries, task=self.record.task, inputs=self.record.inputs)

    def _inputs(self, queries: Sequence[Query], evidence: Evidence | None) -> TokenizedInputs:
        examples = self.examples(queries)
        found = self._evidence(len(examples), evidence)
        record = self.record
        return build_inputs(
            examples, found, self.tokenizer, record.verbalizer, layout=record.layout
        ).inputs

    def _evidence(self, num_queries: int, evidence: Evidence | None) -> Evidence:
        if evidence is None and self.num_evidence:
            raise ConfigError(
                f"this reader was trained with {self.num_evidence} evidence texts a query, and "
                "none are given: give evidence=[[...], ...], a list of texts for each query (pgra "
                "predict finds them), or evidence=[] to read without on purpose"
            )
        if not evidence:
            return [[] for _ in range(num_queries)]
        if len(evidence) != num_queries:
            raise ConfigError(
                f"evidence holds {len(evidence)} lists, there are {num_queries} queries: give one "
                "list of texts for each"
            )
        for place, texts in enumerate(evidence):
            is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
            if not is_list or not all(isinstance(text, str) and is_utf8(text) for text in texts):
                raise ConfigError(f"evidence {place} is {texts!a}: give a list of clean texts")
        return evidence
