"""A trained reader's folder: its record `pgra.json`, and the reader that loads from it alone.

The record is written last, beside the plain T5 files: a folder that has one is whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, overload

from pgra import __version__
from pgra.artifacts import (
    at_home,
    find_damage,
    package_versions,
    record_files,
    write_json,
)
from pgra.config import from_values
from pgra.core import Context, Json, Prediction
from pgra.data.read import hub_errors, hub_reason, is_utf8
from pgra.errors import ArtifactError, ConfigError, DamageError, cut, reading
from pgra.lm.load import choose_device, find_model, load_tokenizer
from pgra.prompts import FewShotPrompt, Verbalizer
from pgra.reader import READER_FOLDER, RECORD_FILE
from pgra.reader.calibrate import Calibration
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import Query, SegmentLayout, TokenizedInputs, build_inputs, read_queries
from pgra.reader.predict import T5Classifier

FORMAT = 2
OWN_INPUTS = ("lm-bff", "rag")  # methods whose readers have inputs of another kind
_OTHERS = (RECORD_FILE, "README.md")  # the model card has the measurement, which comes later
_AGAIN = "copy the folder again, or train again in another"


@dataclass(frozen=True, kw_only=True)
class ReaderRecord:
    """What a reader was trained for and with.

    `inputs` and `words` are in the task's order. `num_evidence` is the paper's d, 0 for a plain T5.
    `prompt` is the second stage's, or None. `base_model` has "name" and "identity" of the first T5.
    `arguments` are all of `PgraArguments`, by section; `fingerprints` those of the stages.
    """

    task: str
    inputs: tuple[str, ...]
    metric: str
    words: Mapping[str, str]
    layout: SegmentLayout
    decode: str
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
        """The labels in the task's order."""
        return tuple(self.words)

    @property
    def verbalizer(self) -> Verbalizer:
        return Verbalizer(self.words, self.layout.template)


def write_record(folder: Path, record: ReaderRecord) -> None:
    """Finish a reader's folder: write its record, with the checksums of its files."""
    paths = (path for path in sorted(folder.iterdir()) if path.is_file())
    names = [path.name for path in paths if not path.name.startswith(".")]
    files = record_files(folder, [name for name in names if name not in _OTHERS])
    values = {**asdict(record), "labels": list(record.labels), "files": files}
    versions = {"pgra": __version__, **package_versions()}
    content = {"format": FORMAT, **values, "versions": versions}
    write_json(folder / RECORD_FILE, content)


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")


def is_on_hub(name: str | Path) -> bool:
    """Return whether a name is OWNER/NAME, and no path here."""
    path = at_home(name)
    here = path.exists() or path.parent.is_dir()
    return not here and _HUB_ID.fullmatch(str(name)) is not None


def fetch_reader(name: str | Path, *, token: str | None = None) -> Path:
    """Find a run or a reader by its folder, or download a reader from the hub.

    `name` is a folder, or OWNER/NAME or OWNER/NAME@REVISION; it returns the folder, or the snapshot
    in the hub's cache. A token of None is HF_TOKEN, or the login's.

    Raises:
        ArtifactError: If the hub has none, cannot be reached, or holds something else there.
    """
    if not is_on_hub(name):
        return at_home(name)
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    repo, _, revision = str(name).partition("@")
    try:  # one small file first: another kind of model may be large
        record = hf_hub_download(repo, RECORD_FILE, revision=revision or None, token=token)
        commit = Path(record).parent.name
        return Path(snapshot_download(repo, revision=commit, token=token))
    except RemoteEntryNotFoundError:
        raise ArtifactError(
            f"'{name}' on the hub is no trained reader (it has no {RECORD_FILE}): give one that "
            "pgra push or run.push_to_hub put there"
        ) from None
    except hub_errors() as error:
        raise ArtifactError(
            f"cannot find reader '{name}': it is no folder here, and the hub says: "
            f"{hub_reason(error)} Give the folder of a run, or a hub id that you can reach"
        ) from None


def find_reader(folder: Path) -> Path:
    """Find the reader's folder in a run, or take it as it is; without one, an ArtifactError."""
    for place in (folder, folder / READER_FOLDER):
        if (place / RECORD_FILE).is_file():
            return place
    raise ArtifactError(
        f"{folder} holds no whole reader (no {RECORD_FILE}): give the folder of a finished run of "
        "pgra train, or its reader/; a run that was stopped resumes with the same command"
    )


def read_record(folder: Path, *, verify: bool = True) -> ReaderRecord:
    """Read the record of a run or a reader's folder, and check the folder against it.

    Raises:
        ArtifactError: If it is missing, or of another version.
        DamageError: If a file is not what was written; with `verify` by its checksum.
    """
    home = find_reader(folder)
    path = home / RECORD_FILE
    with reading(path, DamageError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ArtifactError(
                f"{path} was written by another version of pgra (format {values['format']}, this "
                f"one reads {FORMAT}): use that version, or train again in another folder"
            )
        known = {name: values[name] for name in ReaderRecord.__dataclass_fields__}
        try:
            record = from_values(ReaderRecord, known)
        except ConfigError as error:
            raise DamageError(f"{path} is damaged ({cut(str(error))})", _AGAIN) from None
        if list(record.labels) != values["labels"]:
            raise ValueError("words and labels differ")
        if not record.calibration.temperature > 0:
            raise ValueError(f"temperature is {record.calibration.temperature}")
        for name, what in find_damage(home, values["files"]) if verify else ():
            raise DamageError(f"{home / name} {what}", _AGAIN)
    return record


def check_reads_any(record: ReaderRecord) -> None:
    """Refuse, with a ConfigError, a reader whose inputs only its own method makes."""
    if record.method in OWN_INPUTS:
        raise ConfigError(
            f"this reader was trained by --method {record.method}, which makes its inputs in its "
            "own way: its predictions are in the run's predictions.jsonl, and other examples are "
            "decided by pgra train with another --test_file and --output_dir"
        )


Evidence = Sequence[Sequence[str]]  # texts for each query


class Reader:
    """A trained reader, used: queries and evidence in, labels out.

    `record` says what it was trained for and with; `classifier` scores its labels.
    """

    def __init__(
        self, record: ReaderRecord, model: FusionReader, tokenizer: Any, folder: Path
    ) -> None:
        self.record, self.folder = record, folder
        temperature = record.calibration.temperature
        self.classifier = T5Classifier(
            model, tokenizer, record.verbalizer, record.decode, temperature
        )

    @classmethod
    def load(cls, name: str | Path, *, device: str = "auto", token: str | None = None) -> Self:
        """Load a reader: neither data nor corpus is needed, and a folder may have been moved.

        Args:
            name: A finished run, its `reader/`, or on the hub OWNER/NAME or OWNER/NAME@REVISION.
            device: "auto" (a GPU if there is one), "cpu", "cuda", ...
            token: The hub's; None is HF_TOKEN, or the login's.

        Raises:
            ArtifactError: If there is no whole reader, it is damaged or of another format, or the
                hub cannot be reached.
            ModelError: If it cannot be loaded, or there is no such device.
        """
        place = choose_device(device)  # before anything is downloaded
        home = find_reader(fetch_reader(name, token=token))
        record = read_record(home)
        check_reads_any(record)
        tokenizer = load_tokenizer(find_model(str(home)))
        model = FusionReader.from_name(str(home))
        model.to(place)
        return cls(record, model, tokenizer, home)

    @property
    def labels(self) -> tuple[str, ...]:
        """The task's labels, in its order."""
        return self.record.labels

    @overload
    def predict(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, queries: Query, evidence: Sequence[str] | None = ...
    ) -> Prediction: ...
    @overload
    def predict(
        self, queries: Sequence[Query], evidence: Evidence | None = ...
    ) -> list[Prediction]: ...
    def predict(
        self, queries: Query | Sequence[Query], evidence: Any = None
    ) -> Prediction | list[Prediction]:
        """Decide a query, or each of a list, with calibrated probabilities.

        Args:
            queries: A text, or a mapping of the task's inputs to texts; or a list of these.
            evidence: Texts for the query, or for each of a list, in any order and of any number;
                `[]` for no evidence at all.

        Raises:
            ConfigError: If a query does not fit the task, or a reader that was trained with
                evidence gets None instead of texts or `[]`.
        """
        if isinstance(queries, str | Mapping):
            return self.predict([queries], [evidence] if evidence else evidence)[0]
        inputs = self._inputs(queries, evidence)
        return self.classifier.predict(inputs, Context())

    __call__ = predict

    def _inputs(self, queries: Sequence[Query], evidence: Evidence | None) -> TokenizedInputs:
        record = self.record
        examples = read_queries(queries, task=record.task, inputs=record.inputs)
        if evidence is None and record.num_evidence:
            raise ConfigError(
                f"this reader was trained with {record.num_evidence} evidence texts a query, and "
                "none are given: give evidence=[[...], ...], a list of texts for each query (pgra "
                "predict finds them), or evidence=[] to read without on purpose"
            )
        evidence = evidence or [[] for _ in examples]
        if len(evidence) != len(examples):
            raise ConfigError(
                f"evidence holds {len(evidence)} lists, there are {len(examples)} queries: give "
                "one list of texts for each"
            )
        for row, texts in enumerate(evidence):
            is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
            if not is_list or not all(isinstance(text, str) and is_utf8(text) for text in texts):
                raise ConfigError(f"evidence {row} is {texts!a}: give a list of clean texts")
        tokenizer, layout = self.classifier.tokenizer, record.layout
        return build_inputs(examples, evidence, tokenizer, record.verbalizer, layout=layout)
