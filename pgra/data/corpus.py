"""The searched collection: where its passages come from, memory-mapped and fetched by row.

A passage is one line, or one value of a field of a table (jsonl, csv, tsv, parquet), stripped; a
line break inside a value becomes a space. With `passage_words` a line is a document, cut into
disjoint passages of so many words (Karpukhin et al. 2020, section 4.1); the last may be shorter.
Dropped and counted are blank lines, missing values, repeated passages, and lines that are not UTF-8
if they are at most one in a hundred. Several sources are one corpus, in their order.
"""

import hashlib
import logging
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pgra.artifacts import (
    NO_INPUTS,
    Inputs,
    TemporaryFolder,
    artifact_dir,
    at_home,
    build_once,
    digest,
    file_checksum,
    read_manifest,
    without_home,
    write_lines,
)
from pgra.config import Arguments, arg
from pgra.core import MISSING_ROW, Json, Rows
from pgra.data import read
from pgra.data.bundled import BUNDLED, bundled_corpus_file
from pgra.data.read import PACKED, Reading
from pgra.errors import ConfigError, DamageError, DataError, reading
from pgra.progress import Bar


@dataclass(kw_only=True)
class CorpusArguments(Arguments):
    """The sentences that are searched."""

    GROUP = "Corpus"

    corpus: str | list[str] = arg(
        ["princeton-nlp/datasets-for-simcse/wiki1m_for_simcse.txt"],
        "One passage a line (.txt), or a field of a table (.jsonl, .csv, .tsv), also .gz or .zst; "
        "a column of a .parquet file; hub dataset/file; a hub data set (OWNER/SET:CONFIG:SPLIT, "
        "the last two where there are several); or bundled:NAME. Several are one corpus, in the "
        "order given.",
        is_common=True,
    )
    corpus_field: str = arg("text", "Field that holds the passage, for all but .txt.")
    corpus_id: str | None = arg(
        None,
        "Field that holds a passage's name in TREC run files and qrels; default: its row.",
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
        "Keep only the first of equal passages (their number is reported either way); with "
        "--corpus_id all are kept, each under its name.",
        off="Keep equal passages.",
    )

    def check(self) -> None:
        """Refuse an empty name; a list of one name becomes that name."""
        if isinstance(self.corpus, list) and len(self.corpus) == 1:
            self.corpus = self.corpus[0]
        if not self.sources:
            raise ConfigError("corpus names no file: give one, or a bundled: name")
        for name in ("passage_words", "passage_seed"):  # it cuts lines, or draws one of two equals
            if self.corpus_id is not None and getattr(self, name) is not None:
                raise ConfigError(f"corpus_id and {name} cannot be combined: leave one out")

    @property
    def drops_duplicates(self) -> bool:
        """Whether only the first of equal passages stays: not where each has a name."""
        return self.drop_duplicates and self.corpus_id is None

    @property
    def sources(self) -> list[str]:
        """The corpus's files, in order."""
        return [self.corpus] if isinstance(self.corpus, str) else list(self.corpus)


# Where a corpus' texts come from: a file, a file on the hub, a data set on the hub, a bundled one.
# A source gives raw texts one after the other, never all at once.


KINDS = ("txt", "jsonl", "csv", "tsv", "parquet")
_HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+(:[^:/\\]*){0,2}")
_READ_ROWS = 1 << 12


@dataclass
class Source:
    """Texts of a file or a hub data set.

    Attributes:
        where: The source in words, for messages.
        kind: "txt", "jsonl", "csv", "tsv", "parquet" or "dataset".
        size: Bytes on disk, or a data set's rows.
        inputs: The file as it was found.
        table: The split of a hub data set, memory-mapped, or None.
        commit: The data set's, with config and split.
        reading: How much of it has been read, and which lines were left out.
    """

    where: str
    kind: str
    size: int
    path: Path = Path()
    inputs: Inputs = NO_INPUTS
    table: Any = None
    commit: str = ""
    reading: Reading = field(default_factory=Reading)

    @property
    def identity(self) -> str:
        """What the texts are, for fingerprints: a file's checksum, a data set's commit."""
        return file_checksum(self.path) if self.table is None else self.commit

    def texts(self, column: str) -> Iterator[str]:
        """Yield the texts of a field in order; a missing value of a table is an empty text.

        Raises:
            DataError: If it cannot be read to its end, or has no such field of text.
        """
        if self.kind == "txt":
            lines = read.read_lines(self.path, self.reading)
            return (line.text.replace("\r", " ") for line in lines)  # a stray one is white space
        return (
            "" if value is None else _one_line(place, column, value)
            for place, value in self._values(column, "--corpus_field")
        )

    def ids(self, column: str) -> Iterator[str]:
        """Yield the texts' names in order: words or whole numbers in a field.

        Raises:
            DataError: If there is no such field, or a name is missing or not one word.
        """
        if self.kind == "txt":
            raise DataError(
                f"{self.where} has no fields: leave --corpus_id out, and passages are called by "
                "their rows"
            )
        for place, value in self._values(column, "--corpus_id"):
            yield read.clean_name(place, column, value)

    def _values(self, column: str, flag: str) -> Iterator[tuple[str, object]]:
        """Yield each value of a field with its place, in words."""
        if self.kind in ("parquet", "dataset"):
            with reading(self.where):
                values = chain.from_iterable(self._batches(column, flag))
                for number, value in enumerate(values, 1):
                    yield f"{self.where}, row {number}", value
            return
        for record in read.read_table(self.path, KINDS, [column], self.reading):
            if column not in record.fields:
                raise _no_field(record.place, column, record.fields, flag)
            yield record.place, record.fields[column]

    def _batches(self, column: str, flag: str) -> Iterator[list[object]]:
        """Yield a column of a hub's data set or of a parquet file, some rows at a time."""
        if self.table is not None:
            self._check_column(column, self.table.column_names, flag)
            for batch in self.table.select_columns([column]).with_format("arrow").iter(_READ_ROWS):
                yield batch.column(column).to_pylist()
                self.reading.done += len(batch)
            return
        with pq.ParquetFile(self.path) as file:
            self._check_column(column, file.schema_arrow.names, flag)
            left = total = file.metadata.num_rows
            for batch in file.iter_batches(_READ_ROWS, columns=[column]):
                yield batch.column(column).to_pylist()
                left -= len(batch)
                self.reading.done = self.size * (total - left) // total
            if left:
                raise DataError(f"{self.where} is damaged: {left} of its {total} rows are missing")

    def _check_column(self, column: str, names: Sequence[str], flag: str) -> None:
        if column not in names:
            raise _no_field(self.where, column, names, flag)
        if names.count(column) > 1:
            raise DataError(f"{self.where}: two columns are named '{column}': rename one")


def _no_field(where: str, column: str, found: Iterable[str], flag: str) -> DataError:
    return DataError(
        f"{where}: no field '{column}' (it has {', '.join(found) or 'none'}): name another with "
        f"{flag}"
    )


def _one_line(place: str, column: str, value: object) -> str:
    return " ".join(read.clean_text(place, column, value).split("\n"))


def find_source(name: str) -> Source:
    """Find a corpus by name: a path, bundled:NAME, OWNER/SET/FILE or OWNER/SET[:CONFIG[:SPLIT]].

    Raises:
        DataError: If there is none, or its kind cannot be read.
    """
    if name.startswith(BUNDLED):
        return _open_file(bundled_corpus_file(name.removeprefix(BUNDLED)))
    path = at_home(name)
    parts = name.split("/")
    if path.exists() or not all(parts) or parts[0] in (".", "..", "~") or path.parent.is_dir():
        return _open_file(path)

    if len(parts) >= 3:
        from huggingface_hub import hf_hub_download

        repo, file = "/".join(parts[:2]), "/".join(parts[2:])
        try:
            return _open_file(Path(hf_hub_download(repo, file, repo_type="dataset")))
        except read.hub_errors() as error:
            raise DataError(
                f"cannot find corpus '{name}': there is no such file here, and the hub says: "
                f"{read.hub_reason(error)} Give a local file, a data set's file or "
                "OWNER/SET:CONFIG, or a bundled: name (pgra data lists them)."
            ) from None
    suffixes = [s.lower().lstrip(".") for s in path.suffixes if s.lower() not in PACKED]
    if not _HUB_DATASET.fullmatch(name) or (":" not in name and {*suffixes} & {*KINDS}):
        return _open_file(path)
    repo, _, rest = name.partition(":")
    config, _, split = rest.partition(":")
    builder, tables = read.load_data_set(repo, config or None)
    split = split or (next(iter(tables)) if len(tables) == 1 else "train")
    if split not in tables:
        raise DataError(
            f"data set '{name}' has no split '{split}' (it has {', '.join(tables)}): name one, as "
            "OWNER/SET:CONFIG:SPLIT"
        )
    commit = f"{repo}@{builder.hash}/{builder.config.name}/{split}"
    where, table = f"data set '{name}', split '{split}'", tables[split]
    return Source(where, "dataset", len(table), table=table, commit=commit)


def _open_file(path: Path) -> Source:
    kind = read.check_file(path, KINDS)
    if kind == "parquet" and path.suffix.lower() in PACKED:
        raise DataError(f"{path}: parquet is packed inside and is not read in another: unpack it")
    return Source(str(path), kind, path.stat().st_size, path, Inputs.of([path]))


# Which texts came before, in memory that does not grow with their number.
#
# Hashes of 128 bits lie in sorted runs; a run that is full goes to a file without a name, which the
# system removes with the process, and is memory-mapped.


# Hashes in a full run, 128 MB: a billion texts make 120 runs, and 8 hours of look-ups.
_RUN_ROWS = 1 << 23

_Keys = npt.NDArray[np.uint64]  # (2, n): the halves of n hashes, sorted by the first


class SeenTexts:
    """Finds texts that were seen before; equal means an equal xxh3-128."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[_Keys] = []  # the full ones first, then ever shorter ones

    def add(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Add texts and return which are new, (n,) bool: of equal ones the first."""
        joined = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
        halves = np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: the first of equals stays first
        keys = np.ascontiguousarray(halves[order].T)
        is_new = np.ones(len(texts), dtype=np.bool_)
        is_new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        for run in self._runs:
            # Two hashes that share their first 64 bits but not the rest would hide the second one;
            # among a billion texts that is one chance in forty, and then a duplicate is kept.
            rows = np.minimum(np.searchsorted(run[0], keys[0]), run.shape[1] - 1)
            is_new &= (run[:, rows] != keys).any(axis=0)
        self._keep(keys[:, is_new])
        answer = np.empty_like(is_new)
        answer[order] = is_new
        return answer

    def _keep(self, keys: _Keys) -> None:
        """Keep a sorted run; runs of similar length are merged, so that there are few."""
        while self._runs and self._runs[-1].shape[1] <= 2 * keys.shape[1] < _RUN_ROWS:
            both = np.concatenate([self._runs.pop(), keys], axis=1)
            keys = both[:, np.argsort(both[0], kind="stable")]
        if keys.shape[1] >= _RUN_ROWS // 2:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                keys.tofile(file)
                file.flush()
                run = np.memmap(file, dtype=np.uint64, mode="r", shape=keys.shape)
            self._runs.insert(0, run)
        elif keys.shape[1]:
            self._runs.append(keys)


logger = logging.getLogger(__name__)

_STAGE = "corpus"
COUNTS = ("rows", "blank", "duplicates", "not_utf8")
_FILE = "corpus.arrow"
_BATCH_ROWS = 1 << 14
_BLOCK_ROWS = 1 << 11  # of a batch of the file: read at once, when one of them is asked for
_SCHEMA = pa.schema([("text", pa.large_string())])


@dataclass(frozen=True)
class Corpus:
    """Passages on disk, which are read when they are asked for.

    Attributes:
        folder: The artifact that holds them.
        fingerprint: {"corpus_sha256", "rows"}: the sha256 of the passages, one a line.
        counts: {"rows", "blank", "duplicates", "not_utf8"}: kept, and dropped.
        made_by: How it was asked for; None where it was opened by its folder.
        keeper: Keeps a temporary folder as long as the corpus is used.
    """

    folder: Path
    fingerprint: Mapping[str, Json]
    counts: Mapping[str, int]
    store: "_Store" = field(repr=False, compare=False)
    made_by: CorpusArguments | None = None
    keeper: Any = field(default=None, repr=False, compare=False)

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
        if not len(wanted):
            return []
        if wanted.min() < 0 or wanted.max() >= len(self):
            wrong = wanted[(wanted < 0) | (wanted >= len(self))][0]
            raise IndexError(f"row {wrong} of a corpus of {len(self)} passages")
        order = np.argsort(wanted, kind="stable")
        homes = wanted[order] // _BLOCK_ROWS
        starts = np.flatnonzero(np.r_[True, homes[1:] != homes[:-1]])
        found: list[str] = []
        for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
            inside = wanted[order[start:stop]] % _BLOCK_ROWS
            found += self.store.block(int(homes[start])).take(pa.array(inside)).to_pylist()
        given = [""] * len(wanted)
        for index, text in zip(order.tolist(), found, strict=True):
            given[index] = text
        return given

    def slice(self, start: int, stop: int) -> list[str]:
        """Return the passages from `start` up to `stop`, which may lie past the end."""
        return self.texts(np.arange(max(start, 0), min(stop, len(self))))

    def batched(self, size: int) -> Iterator[list[str]]:
        """Return all passages in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.slice(start, start + size)


class _Store:
    """A corpus' text: Arrow's file format, memory-mapped, `_BLOCK_ROWS` rows a batch."""

    def __init__(self, path: Path, num_rows: int) -> None:
        """Open the file, reading its schema and table of contents."""
        self._path, self._num_rows = path, num_rows
        self._batches: dict[int, Any] = {}
        self._turn = threading.Lock()  # Arrow's reader is for one thread
        with reading(path, DamageError):
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            if self._reader.schema != _SCHEMA:
                raise ValueError(f"its columns are {self._reader.schema}")
            if (count := self._reader.num_record_batches) != -(-num_rows // _BLOCK_ROWS):
                raise ValueError(f"it has {count} batches for {num_rows} rows")

    def block(self, number: int) -> Any:
        with self._turn, reading(self._path, DamageError):
            if number not in self._batches:
                batch = self._reader.get_batch(number)
                batch.validate(full=True)
                if len(batch) != min(_BLOCK_ROWS, self._num_rows - number * _BLOCK_ROWS):
                    raise ValueError(f"batch {number} has {len(batch)} rows")
                self._batches[number] = batch.column(0)
            return self._batches[number]


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
            passage of a list or a data set is no text, or blank.
        ValueError: If `source` is none of these.
    """
    if artifacts is None:
        keeper = TemporaryFolder()
        return replace(open_corpus(source, keeper.path, corpus_field=corpus_field), keeper=keeper)
    artifacts = Path(artifacts)
    if isinstance(source, CorpusArguments):
        return _open(source, artifacts)
    is_file = isinstance(source, str | Path)
    file = source if is_file else write_passages(source, artifacts / "passages", corpus_field)
    how: dict[str, Any] = {} if is_file else {"drop_duplicates": False}
    return _open(CorpusArguments(corpus=str(file), corpus_field=corpus_field, **how), artifacts)


def write_passages(passages: object, folder: Path, corpus_field: str = "text") -> Path:
    """Write texts, or a data set's column `corpus_field`, as a file with one passage a line.

    The file's name holds a digest of the texts.

    Raises:
        DataError: If there are none, or one is no text, or blank: its place would be another's.
        ValueError: If it is something else, or a list of files.
    """
    place, columns = "passages[{}]", getattr(passages, "column_names", None)
    if isinstance(columns, dict):
        raise DataError(f"this is a DatasetDict: give one of its splits ({', '.join(columns)})")
    texts = passages
    if isinstance(columns, list):  # a Dataset; the library takes long to import
        if corpus_field not in columns:
            names = ", ".join(map(str, columns))
            raise DataError(f"the data set has no column '{corpus_field}' (it has {names})")
        place, texts = "row {} of the data set", cast(Any, passages)[corpus_field]
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        kind = type(passages).__name__
        raise ValueError(f"passages are of type {kind}: give a list of texts, a file, or a Dataset")
    found = [read.clean_text(place.format(row), corpus_field, t) for row, t in enumerate(texts)]
    if not found:
        raise DataError("there are no passages: the list is empty")
    if not all(found):
        raise DataError(f"{place.format(found.index(''))} is blank: leave it out")
    if texts is passages and all(map(_is_file, found)):
        raise ValueError(
            f"a list holds passages, and these are files ({found[0]}, ...): give several files as "
            "CorpusArguments(corpus=[...])"
        )
    file = folder / f"passages-{digest(found)[:12]}.jsonl"
    if not file.is_file():
        write_lines(file, [{corpus_field: text} for text in found])
    return file


_LONGEST_NAME = 200


def _is_file(name: str) -> bool:
    return len(name) < _LONGEST_NAME and (name.startswith(BUNDLED) or Path(name).is_file())


def _open(args: CorpusArguments, artifacts: Path) -> Corpus:
    sources = [find_source(name) for name in args.sources]
    kinds, identities = [s.kind for s in sources], [s.identity for s in sources]
    fields: dict[str, Json] = {
        "source": identities[0] if len(sources) == 1 else identities,
        "kind": kinds[0] if len(sources) == 1 else kinds,
        "field": None if {*kinds} == {"txt"} else args.corpus_field,
        "max_passages": args.max_passages,
        "drop_duplicates": args.drops_duplicates,
        "passage_words": args.passage_words,
        "passage_seed": args.passage_seed,
    }
    name = Path(args.sources[0].removeprefix(BUNDLED)).name.split(".")[0].replace(":", "-")
    folder = artifact_dir(artifacts / "corpora", name, fields)
    build_once(
        folder,
        stage=_STAGE,
        fingerprint=fields,
        build=lambda aside: _write_corpus(args, sources, aside),
        inputs=[source.inputs for source in sources],
    )
    return replace(load_corpus(folder), made_by=args)


def passage_ids(corpus: Corpus) -> Iterator[tuple[str, int]]:
    """Yield what passages are called in run files, with their rows: by `corpus_id`, or the row.

    The sources are read again. A name whose text is blank has `MISSING_ROW`.

    Raises:
        DataError: If a source has no such field, or has changed since it was read.
    """
    args = corpus.made_by
    if args is None or args.corpus_id is None:
        yield from ((str(row), row) for row in range(len(corpus)))
        return
    passages = (text for batch in corpus.batched(_BATCH_ROWS) for text in batch)
    wanted, row = next(passages, None), 0
    for name in args.sources:
        texts = find_source(name).texts(args.corpus_field)
        ids = find_source(name).ids(args.corpus_id)
        # A kept passage is the first of its equals, so it is the next line with its text.
        for text, found in zip(texts, ids, strict=True):
            if not text.strip():
                yield found, MISSING_ROW
            elif text.strip() == wanted:
                yield found, row
                wanted, row = next(passages, None), row + 1
    if wanted is not None:
        raise DataError(f"{', '.join(args.sources)} changed since it was read: run it again")


def load_corpus(folder: Path) -> Corpus:
    """Open a corpus that was read before; an ArtifactError if it is unfinished or damaged."""
    manifest = read_manifest(folder, stage=_STAGE)
    counts = {name: manifest.counts.get(name, 0) for name in COUNTS}
    fingerprint = {"corpus_sha256": manifest.counts["sha256"], "rows": counts["rows"]}
    return Corpus(folder, fingerprint, counts, _Store(folder / _FILE, counts["rows"]))


def _write_corpus(
    args: CorpusArguments, sources: Sequence[Source], folder: Path
) -> Mapping[str, Json]:
    """Stream sources into an Arrow file, in constant memory."""
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    found = _passages(args, sources, counts)
    if args.passage_seed is not None:
        found = _drawn(args, found)
    passages = _kept(args, found, folder, counts)
    sha256, total = hashlib.sha256(), sum(source.size for source in sources)
    bar = Bar(desc="read", total=total, unit="", unit_scale=True)
    with bar, pa.OSFile(str(folder / _FILE), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as sink:
        while batch := list(islice(passages, _BATCH_ROWS)):
            whole = pa.record_batch([pa.array(batch, pa.large_string())], schema=_SCHEMA)
            for start in range(0, len(batch), _BLOCK_ROWS):
                sink.write_batch(whole.slice(start, _BLOCK_ROWS))
            sha256.update("".join(f"{passage}\n" for passage in batch).encode())
            counts["rows"] += len(batch)
            bar.set_postfix_str(f"{counts['rows']:,} passages", refresh=False)
            bar.update(sum(source.reading.done for source in sources) - bar.n)
    for source in sources:
        source.reading.check()
        counts["not_utf8"] += source.reading.count
    where = ", ".join(without_home(source.where) for source in sources)
    if not counts["rows"]:
        raise DataError(f"{where} holds no passage: all of its lines are blank")
    told = [counts[name] for name in ("rows", "blank", "duplicates")]
    message = "corpus %s: %d passages, %d blank lines dropped, %d duplicates %s"
    logger.info(message, where, *told, "dropped" if args.drops_duplicates else "kept")
    for source in sources:
        if count := source.reading.count:
            logger.warning("corpus: %d lines dropped, as %s", count, source.reading.first)
    return {**{name: counts[name] for name in COUNTS}, "sha256": sha256.hexdigest()}


def _kept(
    args: CorpusArguments, passages: Iterator[str], folder: Path, counts: Counter[str]
) -> Iterator[str]:
    """Yield passages up to the most that are wanted, without duplicates unless those are kept."""
    seen, rest = SeenTexts(folder), args.max_passages or sys.maxsize
    while batch := list(islice(passages, min(_BATCH_ROWS, rest))):  # no more than is needed
        is_new = seen.add(batch)
        counts["duplicates"] += len(batch) - int(is_new.sum())
        kept = list(compress(batch, is_new)) if args.drops_duplicates else batch
        rest -= len(kept)
        yield from kept


def _drawn(args: CorpusArguments, passages: Iterator[str]) -> Iterator[str]:
    """Yield as many passages as are wanted, drawn over all of them, in their order."""
    again = [find_source(name) for name in args.sources]
    total = sum(1 for _ in _passages(args, again, Counter()))
    size = min(total, args.max_passages or total)
    is_drawn = np.zeros(total, dtype=np.bool_)
    is_drawn[np.random.default_rng(args.passage_seed).choice(total, size, replace=False)] = True
    logger.info("corpus: %d of %d passages are drawn", size, total)
    return compress(passages, is_drawn)


def _passages(
    args: CorpusArguments, sources: Sequence[Source], counts: Counter[str]
) -> Iterator[str]:
    for source in sources:
        for text in source.texts(args.corpus_field):
            document = text.strip()
            if not document:
                counts["blank"] += 1
            elif args.passage_words is None:
                yield document
            else:
                yield from cut_words(document, args.passage_words)


def cut_words(text: str, num_words: int) -> list[str]:
    """Cut a text into blocks of so many words, one space between two; the last holds the rest."""
    words = text.split()
    starts = range(0, len(words), num_words)
    return [" ".join(words[start : start + num_words]) for start in starts]
