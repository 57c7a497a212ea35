"""The searched collection: where its passages come from, kept on disk and fetched by row.

A passage is one line, or one value of a field of a table (jsonl, csv, tsv, parquet), stripped; a
line break inside a value becomes a space. With `passage_words` a line is a document, cut into
disjoint passages of so many words (Karpukhin et al. 2020, section 4.1); the last may be shorter.
Dropped and counted are blank lines, missing values and repeated passages. Several sources are one
corpus, in their order.
"""

import hashlib
import logging
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pgra.arrays import Rows
from pgra.artifacts import (
    Inputs,
    TemporaryFolder,
    artifact_dir,
    at_home,
    build_once,
    digest,
    file_checksum,
    read_array,
    read_manifest,
    without_home,
    write_array,
    write_lines,
)
from pgra.config import Arguments, arg
from pgra.data.bundled import BUNDLED, bundled_corpus_file
from pgra.data.irds import IRDS, find_irds, irds_records
from pgra.data.read import (
    PACKED,
    Record,
    check_file,
    file_kind,
    hub_errors,
    hub_reason,
    load_data_set,
    read_lines,
    read_table,
)
from pgra.errors import ConfigError, DamageError, DataError, reading, show, unknown_name
from pgra.progress import Bar
from pgra.types import MISSING_ROW, Fields, Json, as_texts

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class CorpusArguments(Arguments):
    """The sentences that are searched."""

    GROUP = "Corpus"

    corpus: str | list[str] = arg(
        ["princeton-nlp/datasets-for-simcse/wiki1m_for_simcse.txt"],
        "One passage a line (.txt), or a field of a table (.jsonl, .csv, .tsv, .parquet; .gz and "
        ".zst too); hub dataset/file; a hub data set (OWNER/SET:CONFIG:SPLIT); bundled:NAME; or "
        "irds:NAME of ir_datasets.",
        is_common=True,
    )
    corpus_field: str = arg("text", "Field that holds the passage, for all but .txt.")
    corpus_id: str | None = arg(
        None,
        "Field that holds a passage's name in TREC run files and qrels; default: its row, or the "
        "id of irds:NAME.",
        decides=False,  # a run's fingerprint says which rows are meant
    )
    passage_words: int | None = arg(
        None, "Cut each line, a document, into passages of so many words (DPR: 100).", least=1
    )
    max_passages: int | None = arg(None, "Keep the first so many passages.", least=1)
    passage_seed: int | None = arg(
        None,
        "Draw max_passages over all of the corpus by this seed, instead of keeping the first.",
        least=0,
        needs={"max_passages": True},
    )
    drop_duplicates: bool = arg(
        True,
        "Keep the first of equal passages; with --corpus_id all are kept, each under its name.",
        off="Keep equal passages.",
    )

    def check(self) -> None:
        """Refuse an empty name; a list of one name becomes that name."""
        if isinstance(self.corpus, list) and len(self.corpus) == 1:
            self.corpus = self.corpus[0]
        if not self.sources:
            raise ConfigError("corpus names no file: give one, or a bundled: name")
        is_whole = (self.passage_words, self.passage_seed) == (None, None)
        if is_whole and any(source.startswith(IRDS) for source in self.sources):
            self.corpus_id = self.corpus_id or "id"
        # One cuts lines, the other draws one of two equals.
        if self.corpus_id is not None and not is_whole:
            raise ConfigError("corpus_id excludes passage_words and passage_seed: leave them out")

    @property
    def sources(self) -> list[str]:
        """The corpus's files, in order."""
        return [self.corpus] if isinstance(self.corpus, str) else list(self.corpus)


# Where a corpus' texts come from: a file, a file on the hub, a data set on the hub, a bundled one.


KINDS = ("txt", "jsonl", "csv", "tsv", "parquet")
_HUB_FILE = re.compile(r"[\w-][\w.-]*/[\w.-]+/.+")
_HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[^:/\\]*){0,2}")
_READ_ROWS = 1 << 12


@dataclass(frozen=True)
class Source:
    """A file, a split of a hub data set, or a data set of `ir_datasets`: its rows hold passages.

    Attributes:
        where: The source in words, for messages.
        kind: Of `KINDS`, "dataset" or "irds".
        table: The split, a `datasets.Dataset`, or the library's data set; None of a file.
        commit: The data set's, with config and split; or the library's version.
    """

    where: str
    kind: str
    path: Path = Path()
    table: Any = None
    commit: str = ""

    @property
    def identity(self) -> str:
        """What the rows are, for fingerprints: a file's checksum, a data set's commit."""
        return file_checksum(self.path) if self.table is None else self.commit

    def rows(self, columns: Sequence[str]) -> Iterator[Record]:
        """Yield its rows, which have these fields; a line of a .txt is the first of them.

        Raises:
            DataError: If it cannot be read to its end.
        """
        if self.kind == "txt":
            for number, line in enumerate(read_lines(self.path), 1):
                fields = {columns[0]: line.replace("\r", " ")}
                yield Record(fields, f"{self.where}, line {number}")
        elif self.kind == "irds":
            yield from irds_records(self.where, "docs")
        elif self.kind in ("parquet", "dataset"):
            with reading(self.where):
                for number, values in enumerate(self._values(columns), 1):
                    cells = dict(zip(columns, values, strict=True))
                    yield Record(cells, f"{self.where}, row {number}")
        else:
            yield from read_table(self.path, KINDS)

    def _values(self, columns: Sequence[str]) -> Iterator[tuple[object, ...]]:
        if self.table is None:
            from pyarrow.parquet import ParquetFile

            batches = ParquetFile(self.path).iter_batches(_READ_ROWS, columns=list(columns))
        else:
            batches = self.table.with_format("arrow").iter(_READ_ROWS)
        for batch in batches:  # by name, which fails where there are none or two of it
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def find_source(name: str) -> Source:
    """Find a corpus: a path, bundled:NAME, irds:NAME, OWNER/SET/FILE, OWNER/SET[:CONFIG[:SPLIT]].

    Raises:
        DataError: If there is none, or its kind cannot be read.
    """
    if name.startswith(BUNDLED):
        return _open_file(bundled_corpus_file(name.removeprefix(BUNDLED)))
    if name.startswith(IRDS):
        data = find_irds(name, "docs")
        return Source(name, "irds", table=data, commit=f"{name} {version('ir_datasets')}")
    path = at_home(name)
    is_local = path.exists() or path.parent.is_dir()
    if not is_local and _HUB_FILE.fullmatch(name):
        from huggingface_hub import hf_hub_download

        owner, repo, file = name.split("/", 2)
        try:
            path = Path(hf_hub_download(f"{owner}/{repo}", file, repo_type="dataset"))
        except hub_errors() as error:
            raise DataError(
                f"cannot find corpus '{name}' here, and the hub says: {hub_reason(error)}"
            ) from None
        return _open_file(path)
    is_file = ":" not in name and file_kind(path) in KINDS
    if is_local or is_file or not _HUB_DATASET.fullmatch(name):
        return _open_file(path)
    repo, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    builder, tables = load_data_set(repo, config or None)
    split = split or (next(iter(tables)) if len(tables) == 1 else "train")
    if split not in tables:
        raise DataError(f"'{name}' has no split '{split}' (it has {', '.join(tables)}): name one")
    commit = f"{repo}@{builder.hash}/{builder.config.name}/{split}"
    return Source(f"data set '{name}', split '{split}'", "dataset", Path(), tables[split], commit)


def _open_file(path: Path) -> Source:
    kind = check_file(path, KINDS)
    if kind == "parquet" and path.suffix.lower() in PACKED:
        raise DataError(f"{path}: parquet is packed inside: unpack it")
    return Source(str(path), kind, path)


_STAGE = "corpus"
_FILE = "corpus.txt"
_ENDS = "ends.npy"
_NAMES = "names.txt"


class Corpus:
    """Passages on disk, memory-mapped, which are read when they are asked for.

    Its folder has the passages, one a line; where each ends, in bytes, after a 0 (int64); and the
    names that `corpus_id` gives.

    Attributes:
        folder: The artifact that holds them.
        fingerprint: {"corpus_sha256", "rows"}: the sha256 of the passages, one a line.
        counts: {"rows", "blank", "duplicates"}: kept, and dropped.
        made_by: How it was asked for; None where it was opened by its folder.
    """

    def __init__(
        self,
        folder: Path,
        made_by: CorpusArguments | None = None,
        keeper: TemporaryFolder | None = None,
    ) -> None:
        """Open a corpus that was read before; `keeper` keeps a temporary folder with it.

        Raises:
            ArtifactError: If it is unfinished or damaged.
        """
        counts = read_manifest(folder, stage=_STAGE).counts
        self.folder = folder
        self.made_by = made_by
        self._keeper = keeper
        self.counts: Mapping[str, int] = {
            name: counts[name] for name in ("rows", "blank", "duplicates")
        }
        self.fingerprint: Fields = {
            "corpus_sha256": counts["sha256"],
            "rows": len(self),
        }
        self._ends = read_array(folder / _ENDS)
        with (folder / _FILE).open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        """Count the passages."""
        return self.counts["rows"]

    def __getitem__(self, row: int) -> str:
        """Return one passage; an IndexError if there is no such row."""
        return self.texts([row])[0]

    def texts(self, rows: Sequence[int] | Rows) -> list[str]:
        """Return the passages of these rows, in the order asked, repeats included.

        Raises:
            IndexError: If a row is outside the corpus, such as `MISSING_ROW`.
            DamageError: If the text there cannot be read.
        """
        wanted = np.asarray(rows, dtype=np.int64).reshape(-1)
        outside = wanted[(wanted < 0) | (wanted >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} of a corpus of {len(self)} passages")
        starts = self._ends[wanted].tolist()
        ends = (self._ends[wanted + 1] - 1).tolist()
        with reading(self.folder / _FILE, DamageError):
            return [self._text[i:j].decode() for i, j in zip(starts, ends, strict=True)]

    def slice(self, start: int, stop: int) -> list[str]:
        """Return the passages from `start` up to `stop`, which may lie past the end."""
        return self.texts(np.arange(start, min(stop, len(self))))

    def __iter__(self) -> Iterator[str]:
        """Yield all passages in order."""
        for start in range(0, len(self), _READ_ROWS):
            yield from self.slice(start, start + _READ_ROWS)

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield what passages are called in run files, with their rows: by `corpus_id`, or the row.

        A name whose text is blank has `MISSING_ROW`.
        """
        path = self.folder / _NAMES
        if not path.stat().st_size:
            yield from ((str(row), row) for row in range(len(self)))
        for line in read_lines(path):
            name, row = line.split()
            yield name, int(row)


def open_corpus(
    source: CorpusArguments | str | Path | Iterable[str],
    artifacts: str | Path | None = None,
    *,
    corpus_field: str = "text",
) -> Corpus:
    """Open a corpus, reading its source into `artifacts/corpora` the first time.

    Args:
        source: A file or name as `--corpus` takes it; or the passages themselves, a list or a
            `datasets.Dataset`, whose rows are then their places; or several files and the rules for
            their lines, as `CorpusArguments`. A source that changed is read again.
        artifacts: Root of all products; None: a temporary folder, kept as long as the corpus.
        corpus_field: Field that holds the passage, for all but .txt and lists.

    Raises:
        DataError: If a source is missing, of an unknown kind, empty, damaged or not UTF-8; if a
            passage of a list or a data set is not text, or blank; if `source` is something else.
    """
    keeper = TemporaryFolder() if artifacts is None else None
    root = keeper.path if keeper else Path(str(artifacts))
    if isinstance(source, CorpusArguments):
        args = source
    else:
        is_file = isinstance(source, str | Path)
        file = source if is_file else write_passages(source, root / "passages", corpus_field)
        args = CorpusArguments(corpus=str(file), corpus_field=corpus_field, drop_duplicates=is_file)
    sources = [find_source(name) for name in args.sources]
    inputs = Inputs.of(source.path for source in sources if source.table is None)
    made_of: list[Json] = [{"kind": source.kind, "is": source.identity} for source in sources]
    fields: dict[str, Json] = {**vars(args), "corpus": made_of}
    name = Path(args.sources[0].removeprefix(BUNDLED)).name.split(".")[0]
    folder = artifact_dir(root / "corpora", name, fields)
    build_once(
        folder,
        stage=_STAGE,
        fingerprint=fields,
        build=lambda aside: _write_corpus(args, sources, aside),
        inputs=[inputs],
    )
    return Corpus(folder, args, keeper)


def write_passages(passages: Any, folder: Path, corpus_field: str) -> Path:
    """Write texts, or a data set's column `corpus_field`, as a file with one passage a line.

    The file's name holds a digest of the texts.

    Raises:
        DataError: If one is not text, or blank: its row would be another's; if there are none, or
            they are something else, such as a list of files.
    """
    columns: Any = getattr(passages, "column_names", None)
    is_table = isinstance(columns, list)  # a `datasets.Dataset`
    if is_table and corpus_field not in columns:
        raise DataError(f"passages: {unknown_name('column', corpus_field, columns)}")
    texts = as_texts("passages", passages[corpus_field] if is_table else passages)
    texts = [text.strip() for text in texts]
    if "" in texts:
        raise DataError(f"passage {texts.index('')} is blank: leave it out")
    if not is_table and all(map(os.path.isfile, texts)):  # none at all, too
        raise DataError(
            f"passages are {show(texts)}: give texts, or CorpusArguments(corpus=[FILE, ...])"
        )
    file = folder / f"passages-{digest(texts)[:12]}.jsonl"
    if not file.is_file():
        write_lines(file, [{corpus_field: text} for text in texts])
    return file


def _write_corpus(args: CorpusArguments, sources: Sequence[Source], folder: Path) -> Fields:
    """Read the sources twice: to choose passages by their hashes, and to write the chosen.

    Two different texts of 21 million have one hash with a chance of one in 80,000, and then the
    second is dropped.
    """
    where = ", ".join(without_home(source.where) for source in sources)
    keys = (xxhash.xxh3_64_intdigest(text.encode()) for _, text in _passages(args, sources))
    hashes = np.fromiter(Bar(keys, desc="read", unit=" passages"), np.uint64)
    rows = np.flatnonzero(hashes != xxhash.xxh3_64_intdigest(b""))
    counts = {"blank": len(hashes) - len(rows)}
    most = args.max_passages
    if args.passage_seed is not None and most is not None:
        draw = np.random.default_rng(args.passage_seed)
        rows = rows[np.sort(draw.choice(len(rows), min(most, len(rows)), replace=False))]
    first = np.sort(np.unique(hashes[rows], return_index=True)[1])
    counts["duplicates"] = len(rows) - len(first)
    if args.drop_duplicates and args.corpus_id is None:  # of names each has its own
        rows = rows[first]
    rows = rows[:most]
    counts = {"rows": len(rows), **counts}
    if not len(rows):
        raise DataError(f"{where} holds no passage: all of its lines are blank")

    new_rows = np.full(len(hashes), MISSING_ROW)
    new_rows[rows] = np.arange(len(rows))
    ends = np.zeros(len(rows) + 1, np.int64)
    sha256 = hashlib.sha256()
    with (folder / _FILE).open("wb") as file, (folder / _NAMES).open("wb") as names:
        passages = Bar(_passages(args, sources), desc="write", unit=" passages", total=len(hashes))
        for (name, text), row in zip(passages, new_rows, strict=False):
            if row != MISSING_ROW:
                line = f"{text}\n".encode()
                sha256.update(line)
                ends[row + 1] = ends[row] + file.write(line)
            if name and (row != MISSING_ROW or not text):
                names.write(f"{name} {row}\n".encode())
    write_array(folder / _ENDS, ends)
    logger.info("corpus %s: %s", where, ", ".join(f"{n} {name}" for name, n in counts.items()))
    return {**counts, "sha256": sha256.hexdigest()}


def _passages(args: CorpusArguments, sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """Yield the name ("" without `corpus_id`) and text of each passage, blank ones included."""
    column = args.corpus_field
    size = args.passage_words
    columns = [column] if args.corpus_id is None else [column, args.corpus_id]
    for source in sources:
        for row in source.rows(columns):
            name = "" if args.corpus_id is None else row.word(args.corpus_id)
            text = "" if row.value(column) is None else row.text(column).replace("\n", " ")
            if size is None or not text:
                yield name, text
                continue
            words = text.split()
            for start in range(0, len(words), size):
                yield name, " ".join(words[start : start + size])
