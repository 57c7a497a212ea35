"""A trained reader's folder: what `pgra.json` says of it, and its use by that folder alone.

It is written last, beside the plain T5 files: a folder that has one is whole.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from pgra import __version__
from pgra.artifacts import file_checksum, package_versions, write_json
from pgra.core import Example, Json, Prediction
from pgra.data.read import is_utf8
from pgra.errors import ArtifactError, ConfigError, PgraError
from pgra.lm.batching import PackedSegments
from pgra.lm.load import choose_device, find_model, load_tokenizer
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import Query, SegmentLayout, TokenizedInputs, build_inputs, read_queries
from pgra.reader.predict import (
    Calibration,
    Decision,
    batch_tokens_on,
    map_batches,
    predict,
    score_with_attention,
)

READER_FOLDER = "reader"
RECORD_FILE = "pgra.json"
FORMAT = 1
OWN_INPUTS = ("lm-bff", "rag")
"""Systems whose readers do not read a query and its evidence as all others do."""
_OTHERS = (RECORD_FILE, "README.md")  # the model card tells of the measurement, which comes later


@dataclass(frozen=True, kw_only=True)
class ReaderRecord:
    """What a reader was trained for and with.

    Attributes:
        task: The task's name.
        inputs: Fields of a query, in the task's order.
        metric: The task's metric.
        words: Word by label, in the task's order of labels.
        layout: How a query and an evidence become a segment.
        decode: As in `Decision`.
        length_normalize: As in `Decision`.
        calibration: The temperature of its probabilities.
        num_evidence: Evidence a query, the paper's d; 0 for a plain T5.
        method: t5, fid, pgra or pgra-exhaustive.
        prompt: What the second stage's LM reads before a text; None where there is none.
        base_model: The T5 it began as: {"name", "identity"}.
        seed: Of its training.
        arguments: All of `PgraArguments`, by section.
        fingerprints: Of data, corpus, index, reranker (LM, prompt and bank) and evidence.
    """

    task: str
    inputs: tuple[str, ...]
    metric: str
    words: Mapping[str, str]
    layout: SegmentLayout
    decode: str
    length_normalize: bool
    calibration: Calibration
    num_evidence: int
    method: str
    prompt: FewShotPrompt | None
    base_model: Mapping[str, str]
    seed: int
    arguments: Mapping[str, Mapping[str, Any]]
    fingerprints: Mapping[str, Json]

    @property
    def labels(self) -> tuple[str, ...]:
        """Give the labels in the task's order."""
        return tuple(self.words)

    @property
    def verbalizer(self) -> Verbalizer:
        """Give the reader's words."""
        return Verbalizer(self.words, self.layout.template)

    @property
    def decision(self) -> Decision:
        """Give how labels are decided, with the fitted temperature."""
        return Decision(self.decode, self.length_normalize, self.calibration.temperature)


def write_record(folder: Path, record: ReaderRecord) -> None:
    """Finish a reader's folder: say what it is, with the checksums of its files."""
    files = {
        path.name: {"bytes": path.stat().st_size, "checksum": file_checksum(path)}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in _OTHERS and not path.name.startswith(".")
    }
    values = {**asdict(record), "labels": list(record.labels), "files": files}
    versions = {"pgra": __version__, **package_versions()}
    write_json(folder / RECORD_FILE, {"format": FORMAT, **values, "versions": versions})


def find_reader(folder: Path) -> Path:
    """Find the reader's folder in a run, or take it as it is.

    Raises:
        ArtifactError: If there is no whole one; it is said how to go on.
    """
    for place in (folder, folder / READER_FOLDER):
        if (place / RECORD_FILE).is_file():
            return place
    if not folder.is_dir():
        raise ArtifactError(f"{folder} does not exist: give the folder of a run, or its reader/")
    is_run = (folder / "run.json").is_file() or (folder / READER_FOLDER).is_dir()
    if is_run or (folder.parent / "run.json").is_file():
        raise ArtifactError(
            f"{folder} holds no whole reader (no {RECORD_FILE}): the run was stopped before its "
            "end, and the same train.py command goes on with it"
        )
    kind = "is a plain model folder" if (folder / "config.json").is_file() else "is no run"
    raise ArtifactError(
        f"{folder} {kind}, not a trained reader (it has no {RECORD_FILE}): give the folder of a "
        "finished run of train.py, or its reader/"
    )


def read_record(folder: Path, *, verify: bool = True) -> ReaderRecord:
    """Read what a reader's folder says of itself, and check the folder against it.

    Args:
        folder: A run, or its reader's folder.
        verify: Whether to compare the files' checksums.

    Raises:
        ArtifactError: If it is missing, damaged (the file is named), or of another format.
    """
    home = find_reader(folder)
    path = home / RECORD_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(values, dict) or "format" not in values:
        raise _damaged(path, "it does not say its format")
    if values["format"] != FORMAT:
        raise ArtifactError(
            f"{path} has format {values['format']}, this pgra ({__version__}) reads {FORMAT}: "
            "update pgra, or train again"
        )
    try:
        record = _parse(values)
        if verify:
            _check_files(home, values["files"])
    except ArtifactError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, PgraError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    return record


def _parse(values: Mapping[str, Any]) -> ReaderRecord:
    prompt, words = values["prompt"], values["words"]
    if list(words) != values["labels"]:
        raise ValueError("words and labels differ")
    if prompt is not None:
        template = prompt["template"]
        body = PromptTemplate(template["body"], template["answer"], tuple(template["inputs"]))
        first, *others = (
            FewShotPrompt(body, one["prefix"], tuple(one["exemplar_ids"]))
            for one in (prompt, *prompt.get("others", ()))
        )
        prompt = replace(first, others=tuple(others))
    calibration = Calibration(**values["calibration"])
    if not calibration.temperature > 0:
        raise ValueError(f"temperature is {calibration.temperature}")
    return ReaderRecord(
        task=values["task"],
        inputs=tuple(values["inputs"]),
        metric=values["metric"],
        words=words,
        layout=SegmentLayout(**values["layout"]),
        decode=values["decode"],
        length_normalize=values["length_normalize"],
        calibration=calibration,
        num_evidence=int(values["num_evidence"]),
        method=values["method"],
        prompt=prompt,
        base_model=values["base_model"],
        seed=int(values["seed"]),
        arguments=values["arguments"],
        fingerprints=values["fingerprints"],
    )


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing: copy the folder again, or train again")
        if path.stat().st_size != known["bytes"] or file_checksum(path) != known["checksum"]:
            raise ArtifactError(
                f"{path} is damaged (it is not what was written): copy the folder again, or train "
                "again"
            )


def _damaged(path: Path, why: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged ({why}): copy the folder again, or train again")


def check_reads_any(record: ReaderRecord) -> None:
    """Refuse a reader whose inputs only its own system makes.

    Raises:
        ConfigError: If it is one; the way to measure it is named.
    """
    system = record.arguments.get("runtime", {}).get("system", "pgra")
    if system in OWN_INPUTS:
        raise ConfigError(
            f"this reader was trained by --system {system}, which makes its inputs in its own way: "
            "its predictions are in the run's predictions.jsonl, and other examples are decided by "
            "train.py with another --test_file and --output_dir"
        )


# A trained reader, used: queries and evidence in, labels out. It needs its folder and no more.


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
