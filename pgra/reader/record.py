"""A trained reader's folder: its record `pgra.json`, and the reader that loads from it alone.

The record is written last, beside the plain T5 files: a folder that has one is whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from pgra.artifacts import (
    find_damage,
    package_versions,
    read_sealed,
    record_files,
    write_sealed,
)
from pgra.data.read import fetch_folder
from pgra.data.tasks import check_slots
from pgra.errors import ArtifactError, ConfigError, DamageError, reading
from pgra.lm.load import choose_device, find_model, load_tokenizer
from pgra.parallel import Turn
from pgra.prompts import FewShotPrompt, Verbalizer
from pgra.reader.calibration import Calibration
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SegmentLayout, build_inputs
from pgra.reader.predict import T5Classifier
from pgra.run_folder import READER_FOLDER, RECORD_FILE
from pgra.types import Fields, Prediction, Query, as_list, as_texts, read_queries

FORMAT = 3
_AGAIN = "copy the folder again, or train again in another"


@dataclass(frozen=True, kw_only=True)
class ReaderRecord:
    """What a reader was trained for and with.

    `inputs` and `words` are in the task's order. `num_evidence` is the paper's d, 0 for a plain T5.
    `has_own_inputs` says that its method alone makes what it reads. `prompt` is the second stage's,
    or None.
    `arguments` are the run's by section, but for its training; `fingerprints` those of the stages.
    """

    task: str
    inputs: tuple[str, ...]
    words: Mapping[str, str]
    layout: SegmentLayout
    decode: str
    calibration: Calibration
    num_evidence: int
    method: str
    has_own_inputs: bool
    prompt: FewShotPrompt | None
    seed: int
    arguments: Mapping[str, Mapping[str, Any]]
    fingerprints: Fields

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the task's order."""
        return tuple(self.words)

    @property
    def verbalizer(self) -> Verbalizer:
        return Verbalizer(self.words, self.layout.template)


def write_record(folder: Path, record: ReaderRecord) -> None:
    """Finish a new reader's folder: write its record, with the checksums of its files.

    The model card, which has the measurement, comes later.
    """
    (folder / RECORD_FILE).unlink(missing_ok=True)
    values = {"format": FORMAT, **asdict(record), "files": record_files(folder)}
    write_sealed(folder / RECORD_FILE, {**values, "versions": dict(package_versions())})


def find_reader(folder: Path) -> Path:
    """Find the reader's folder in a run, or take it as it is; without one, an ArtifactError."""
    for home in (folder, folder / READER_FOLDER):
        if (home / RECORD_FILE).is_file():
            return home
    raise ArtifactError(
        f"{folder} holds no trained reader ({RECORD_FILE}): train one, or resume its run"
    )


def read_record(folder: Path) -> ReaderRecord:
    """Read the record of a run or a reader's folder, and check the folder against it.

    Raises:
        ArtifactError: If it is missing, or of another version.
        DamageError: If a file is not what was written.
    """
    home = find_reader(folder)
    path = home / RECORD_FILE
    with reading(path, DamageError):
        values = read_sealed(path)
        if values["format"] != FORMAT:
            raise ArtifactError(f"{path} has format {values['format']}, this pgra reads {FORMAT}")
        record = msgspec.convert(values, ReaderRecord)
        check_slots(f"layout.template of {path}", record.layout.template, record.inputs)
        for name, what in find_damage(home, values["files"]):
            raise DamageError(f"{home / name} {what}", _AGAIN)
    return record


def check_reads_any(record: ReaderRecord) -> None:
    """Refuse, with a ConfigError, a reader whose inputs only its own method makes."""
    if record.has_own_inputs:
        raise ConfigError(
            f"this reader was trained by method {record.method}, which makes its inputs in its "
            "own way: other examples are decided by pgra train with another --test_file"
        )


class Reader:
    """A trained reader, used: queries and evidence in, labels out.

    `record` says what it was trained for and with; `classifier` scores its labels.
    """

    def __init__(self, record: ReaderRecord, model: FusionReader, tokenizer: Any) -> None:
        self.record = record
        self.busy = Turn()
        self.classifier = T5Classifier(
            model,
            tokenizer,
            record.verbalizer,
            record.decode,
            record.calibration,
        )

    @classmethod
    def load(cls, name: str | Path, *, device: str = "auto") -> Self:
        """Load a reader: neither data nor corpus is needed, and a folder may have been moved.

        Args:
            name: A finished run, its `reader/`, or on the hub OWNER/NAME or OWNER/NAME@REVISION.
            device: "auto" (a GPU if there is one), "cpu", "cuda", ...

        Raises:
            ArtifactError: If there is no whole reader, it is damaged or of another format, or the
                hub cannot be reached.
            ModelError: If it cannot be loaded, or there is no such device.
        """
        torch_device = choose_device(device)  # before anything is downloaded
        home = find_reader(fetch_folder("reader", name))
        record = read_record(home)
        check_reads_any(record)
        source = find_model(str(home))
        tokenizer = load_tokenizer(source)
        model = FusionReader.from_source(source)
        model.to(torch_device)
        return cls(record, model, tokenizer)

    @property
    def labels(self) -> tuple[str, ...]:
        """The task's labels, in its order."""
        return self.record.labels

    def __call__(self, query: Query, evidence: Sequence[str] | None = None) -> Prediction:
        """Decide one query; see `predict`."""
        return self.predict([query], None if evidence is None else [evidence])[0]

    def predict(
        self, queries: Sequence[Query], evidence: Sequence[Sequence[str]] | None = None
    ) -> list[Prediction]:
        """Decide queries, with calibrated probabilities.

        Args:
            queries: Texts, or mappings of the task's inputs to texts; none is blank.
            evidence: Texts for each query, in any order and of any number; `[]` for no evidence at
                all.

        Raises:
            ConfigError: If a reader that was trained with evidence gets None instead of texts or
                `[]`, or not one list a query.
            DataError: If a query does not fit the task, or evidence is not texts.
        """
        record = self.record
        examples = read_queries(as_list("queries", queries), record.inputs)
        if evidence is None and record.num_evidence:
            raise ConfigError(
                f"this reader was trained with {record.num_evidence} evidence texts a query: give "
                "evidence=[[...], ...] (pgra predict finds it), or evidence=[] to read without"
            )
        lists = as_list("evidence", evidence or [()] * len(examples))
        evidence = [as_texts(f"evidence[{number}]", texts) for number, texts in enumerate(lists)]
        if len(evidence) != len(examples):
            raise ConfigError(
                f"evidence holds {len(evidence)} lists for {len(examples)} queries: give one each"
            )
        inputs = build_inputs(
            examples,
            evidence,
            self.classifier.tokenizer,
            record.verbalizer,
            layout=record.layout,
        )
        with self.busy:  # of several threads one at a time
            return self.classifier.predict(inputs)
