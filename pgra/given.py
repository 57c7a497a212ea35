"""What is given from Python in memory, as files: a run reads them again later.

ARTIFACTS/given/TASK/train-DIGEST.jsonl     rows by split, the digest that of their content
ARTIFACTS/given/TASK-DIGEST/TASK.yaml       a task without a file
ARTIFACTS/given/index-DIGEST/               an index that had a temporary folder
ARTIFACTS/passages/passages-DIGEST.jsonl    a corpus (`pgra.data.corpus.write_passages`)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pgra.artifacts import canonical_json, digest, write_text
from pgra.data.bundled import BUNDLED
from pgra.data.corpus import Corpus, CorpusArguments
from pgra.data.examples import RawSplit, Rows, open_rows, read_split
from pgra.data.tasks import GenerationTask, Task
from pgra.errors import ConfigError, DataError
from pgra.retrieval.dense import Index

GivenRows = Rows | str | Path  # in memory, or a file's name
GivenCorpus = str | Path | Iterable[str] | Corpus | Index


@dataclass
class Given:
    """Files in `home` to be written once all else is checked."""

    home: Path
    texts: dict[Path, str] = field(default_factory=dict)

    def name_task(self, task: str | Path | Task | GenerationTask) -> str:
        """Return the name of a task, or the path of its YAML."""
        if isinstance(task, str | Path):
            return str(task)
        text = task.to_yaml()
        path = self.home / f"{task.name}-{digest(text)[:12]}" / f"{task.name}.yaml"
        self.texts[path] = text
        return str(path)

    def name_rows(self, task: Task | GenerationTask, rows: GivenRows, split: str) -> str:
        """Return the file of a split's rows, which are checked."""
        if str(rows).startswith(BUNDLED):
            raise ConfigError(
                f"{split} is '{rows}', a data set of several splits: give dataset_name='{rows}'"
            )
        if isinstance(rows, str | Path):
            return str(rows)
        text = _as_jsonl(task, open_rows(task, rows, split), split)
        path = self.home / task.name / f"{split}-{digest(text)[:12]}.jsonl"
        self.texts[path] = text
        return str(path)

    def write(self) -> None:
        for path, text in self.texts.items():
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)


def _as_jsonl(task: Task | GenerationTask, raw: RawSplit, split: str) -> str:
    """Check rows, and return them as jsonl of the task, in their order."""
    read_split(task, raw, split)
    lines = []
    for row in raw.rows:
        values: dict[str, Any] = dict(row.fields)
        if isinstance(task, Task) or task.kind == "question":
            values = {
                task.local.columns.get(name, name): values[column]
                for name, column in raw.columns.items()
            }
        target = task.local.columns.get(task.target, task.target)
        label = values.get(target)
        if raw.classes and isinstance(label, int) and 0 <= label < len(raw.classes):
            values[target] = raw.classes[label]
        try:
            lines.append(canonical_json(values))
        except TypeError as error:
            raise DataError(f"{row.place}: {error}") from None
    return "".join(f"{line}\n" for line in lines)


def corpus_arguments(corpus: GivenCorpus, home: Path, *, is_dense: bool) -> dict[str, Any]:
    """Return the arguments that name a corpus; none of texts, which are written later.

    An index gives its own arguments too where the first stage `is_dense`.
    """
    if isinstance(corpus, str | Path):
        return {"corpus": str(corpus)}
    values: dict[str, Any] = {}
    if isinstance(corpus, Index):
        index = corpus
        if index.is_temporary:
            kept = home / f"index-{digest(dict(index.fingerprint))[:12]}"
            if not kept.is_dir():
                index.save(kept)
            index = Index.load(kept, encoder=index.encoder)
        corpus = index.corpus
        values |= _not_default(index.args) if is_dense else {}
    if not isinstance(corpus, Corpus):
        return {}
    made_by = corpus.made_by
    if made_by is None:
        raise ConfigError("this corpus was opened by its folder: give its file, or its texts")
    return {**values, "corpus": made_by.sources, **_not_default(made_by)}


def _not_default(part: CorpusArguments | Any) -> dict[str, Any]:
    return {
        f.name: getattr(part, f.name)
        for f in fields(part)
        if f.name != "corpus" and getattr(part, f.name) != f.default
    }
