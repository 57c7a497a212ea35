"""The searched collection: passages from a file, memory-mapped and fetched by row.

A passage is one line: white space around it is dropped, and a line break inside a JSON value
becomes a space. With `passage_words` a line is a document, and its passages are blocks of so many
words that do not overlap (Karpukhin et al. 2020, section 4.1), the last as long as what is left.
Blank lines are dropped, and so are lines that are not UTF-8, if they are fewer than one in a
hundred. Of equal passages the first stays. All are counted; `strict` refuses them. Several files
are one corpus: their passages in the order of the files, so that one more file adds rows behind.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pgra.config import CorpusArguments
from pgra.data.build import build_once
from pgra.data.bundled import bundled_corpus_file
from pgra.data.hubfile import fetch_file, hub_errors, hub_reason
from pgra.data.textfile import Spoiled, check_file, is_utf8, read_lines, read_records
from pgra.errors import ArtifactError, DataError
from pgra.io import Manifest, artifact_dir, file_checksum, read_manifest
from pgra.types import Json, Rows

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
KINDS = ("txt", "jsonl")
STAGE = "corpus"
COUNTS = ("rows", "blank", "duplicates", "not_utf8")
_FILE = "corpus.arrow"
_BATCH_ROWS = 1 << 14
_SCHEMA = pa.schema([("text", pa.large_string())])


@dataclass(frozen=True)
class Corpus:
    """Passages on disk. Nothing of the text is in memory but what is asked for.

    Attributes:
        folder: The artefact that holds them.
        fingerprint: {"corpus_sha256", "rows"}: the sha256 of the passages, one a line.
        counts: {"rows", "blank", "duplicates", "not_utf8"}: kept, and what the source held beside.
        batches: The memory-mapped text, `_BATCH_ROWS` rows each but the last.
        made_by: How it was asked for; None where it was opened by its folder.
    """

    folder: Path
    fingerprint: Mapping[str, Json]
    counts: Mapping[str, int]
    batches: Sequence[Any]
    made_by: CorpusArguments | None = None

    def __len__(self) -> int:
        """Count the passages."""
        return self.counts["rows"]

    def __getitem__(self, row: int) -> str:
        """Give one passage.

        Raises:
            IndexError: If there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} passages")
        return str(self.batches[row // _BATCH_ROWS].column(0)[row % _BATCH_ROWS].as_py())

    def texts(self, rows: Sequence[int] | Rows) -> list[str]:
        """Give the passages of these rows, in the order asked, repeats included.

        Raises:
            IndexError: If a row is outside the corpus, such as `MISSING_ROW`.
        """
        wanted = np.asarray(rows, dtype=np.int64).reshape(-1)
        if not len(wanted):
            return []
        if wanted.min() < 0 or wanted.max() >= len(self):
            wrong = wanted[(wanted < 0) | (wanted >= len(self))][0]
            raise IndexError(f"row {wrong} of a corpus of {len(self)} passages")
        order = np.argsort(wanted, kind="stable")
        homes = wanted[order] // _BATCH_ROWS
        starts = np.flatnonzero(np.r_[True, homes[1:] != homes[:-1]])
        found: list[str] = []
        for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True):
            inside = wanted[order[start:stop]] % _BATCH_ROWS
            found += self.batches[homes[start]].column(0).take(pa.array(inside)).to_pylist()
        given = [""] * len(wanted)
        for place, text in zip(order.tolist(), found, strict=True):
            given[place] = text
        return given

    def slice(self, start: int, stop: int) -> list[str]:
        """Give the passages from `start` up to `stop`, which may lie past the end."""
        return self.texts(np.arange(max(start, 0), min(stop, len(self))))

    def batched(self, size: int) -> Iterator[list[str]]:
        """Give all passages in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.slice(start, start + size)


def open_corpus(args: CorpusArguments, artifacts: Path, *, is_told: bool = True) -> Corpus:
    """Open a corpus by name, reading its source into `artifacts/corpora` the first time.

    The folder's name holds the source's checksum, so a changed source is read again.

    Args:
        args: Which corpus, and the rules for its lines.
        artifacts: Root of all products.
        is_told: Whether to say what was read; the user did not ask for every corpus there is.

    Raises:
        DataError: If a source is missing, of an unknown kind, empty, damaged or not UTF-8; with
            `strict`, if it holds lines that were dropped.
        ArtifactError: If what was read before is damaged.
    """
    sources = [_find_source(name) for name in args.sources]
    kinds = [check_file(source, KINDS) for source in sources]
    checksums = [file_checksum(source) for source in sources]
    fields: dict[str, Json] = {
        "source": checksums[0] if len(sources) == 1 else checksums,
        "kind": kinds[0] if len(sources) == 1 else kinds,
        "field": args.corpus_field if "jsonl" in kinds else None,
        "max_passages": args.max_passages,
        "drop_duplicates": args.drop_duplicates,
    }
    if args.passage_words is not None:  # folders of corpora made without it keep their names
        fields["passage_words"] = args.passage_words
    name = Path(args.sources[0].removeprefix(BUNDLED)).name.split(".")[0]
    folder = artifact_dir(artifacts / "corpora", name, fields)
    manifest = build_once(
        folder,
        stage=STAGE,
        fingerprint=fields,
        build=lambda aside: _CorpusWriter(args, sources, is_told=is_told).write(aside),
    )
    corpus = replace(_open(folder, manifest), made_by=args)
    if args.strict:
        _refuse_dropped(corpus, args)
    return corpus


def _refuse_dropped(corpus: Corpus, args: CorpusArguments) -> None:
    names = {"blank": "blank lines", "not_utf8": "lines that are not UTF-8"}
    if args.drop_duplicates:
        names["duplicates"] = "duplicates"
    told = [f"{corpus.counts[key]:,} {what}" for key, what in names.items() if corpus.counts[key]]
    if told:
        raise DataError(
            f"{', '.join(args.sources)} holds {', '.join(told)}, and --strict refuses them: mend "
            "the file, or leave --strict out to drop and count them"
        )


def changed_sources(args: CorpusArguments, folder: Path) -> list[str]:
    """Name the sources that are not, or no more, what a corpus was read from.

    Args:
        args: How the corpus was asked for.
        folder: Where it was read into.

    Raises:
        DataError: If a source is missing.
        ArtifactError: If the folder is missing, unfinished or damaged.
    """
    made = read_manifest(folder, stage=STAGE, verify=False).fingerprint["source"]
    checksums = made if isinstance(made, list) else [made]
    changed = []
    for name, checksum in zip(args.sources, checksums, strict=True):
        source = _find_source(name)
        check_file(source, KINDS)
        changed += [] if file_checksum(source) == checksum else [name]
    return changed


def load_corpus(folder: Path) -> Corpus:
    """Open a corpus that was read before.

    Raises:
        ArtifactError: If the folder is missing, unfinished or damaged.
    """
    return _open(folder, read_manifest(folder, stage=STAGE, verify=False))


def _open(folder: Path, manifest: Manifest) -> Corpus:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(folder / _FILE)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(
            f"{folder / _FILE} cannot be read ({error}): delete {folder} and run again"
        ) from None
    counts = {name: int(str(manifest.counts.get(name, 0))) for name in COUNTS}
    fingerprint = {"corpus_sha256": manifest.counts["sha256"], "rows": counts["rows"]}
    return Corpus(folder, fingerprint, counts, batches)


class _CorpusWriter:
    """Streams sources into an Arrow file. Memory: about 100 bytes a passage, for duplicates."""

    def __init__(self, args: CorpusArguments, sources: Sequence[Path], *, is_told: bool) -> None:
        self.args = args
        self._level = logging.INFO if is_told else logging.DEBUG
        self.sources = sources
        self.name = ", ".join(map(str, sources))  # for messages
        self.spoiled = [Spoiled() for _ in sources]
        self.seen: set[bytes] = set()
        self.sha256 = hashlib.sha256()
        self.rows = self.blank = self.duplicates = self.cut = 0

    def write(self, folder: Path) -> Mapping[str, Json]:
        with pa.OSFile(str(folder / _FILE), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as sink:
            batch: list[str] = []
            for passage in self._kept():
                batch.append(passage)
                if len(batch) == _BATCH_ROWS:
                    self._flush(sink, batch)
            self._flush(sink, batch)
        for spoiled in self.spoiled:
            spoiled.check()
        if not self.rows:
            raise DataError(f"{self.name} holds no passage: all of its lines are blank")
        if self.args.passage_words is not None and not self.cut:
            logger.warning(
                "corpus %s: no line has more than %d words, so passage_words cuts nothing; a line "
                "must be a document",
                self.name,
                self.args.passage_words,
            )
        logger.log(
            self._level,
            "corpus %s: %d passages, %d blank lines dropped, %d duplicates %s",
            self.name,
            self.rows,
            self.blank,
            self.duplicates,
            "dropped" if self.args.drop_duplicates else "kept",
        )
        for spoiled in self.spoiled:
            if spoiled.count:
                logger.warning("corpus: %d lines dropped, as %s", spoiled.count, spoiled.first)
        return {
            "rows": self.rows,
            "blank": self.blank,
            "duplicates": self.duplicates,
            "not_utf8": sum(spoiled.count for spoiled in self.spoiled),
            "sha256": self.sha256.hexdigest(),
        }

    def _flush(self, sink: Any, batch: list[str]) -> None:
        if batch:
            sink.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema=_SCHEMA))
            self.sha256.update("".join(f"{passage}\n" for passage in batch).encode())
            self.rows += len(batch)
            batch.clear()

    def _kept(self) -> Iterator[str]:
        kept = 0
        for passage in self._passages():
            key = xxhash.xxh3_128_digest(passage.encode())
            if key in self.seen:
                self.duplicates += 1
                if self.args.drop_duplicates:
                    continue
            self.seen.add(key)
            yield passage
            kept += 1
            if kept == self.args.max_passages:
                return

    def _passages(self) -> Iterator[str]:
        for text in self._raw():
            document = text.strip()
            if not document:
                self.blank += 1
            elif self.args.passage_words is None:
                yield document
            else:
                blocks = cut_words(document, self.args.passage_words)
                self.cut += len(blocks) > 1
                yield from blocks

    def _raw(self) -> Iterator[str]:
        for source, spoiled in zip(self.sources, self.spoiled, strict=True):
            yield from _raw_passages(source, self.args.corpus_field, spoiled)


def cut_words(text: str, num_words: int) -> list[str]:
    """Cut a text into blocks of so many words, one space between two; the last holds the rest."""
    words = text.split()
    starts = range(0, len(words), num_words)
    return [" ".join(words[start : start + num_words]) for start in starts]


def _raw_passages(source: Path, field: str, spoiled: Spoiled) -> Iterator[str]:
    if check_file(source, KINDS) == "txt":
        num_lines, has_returns = 0, False
        for line in read_lines(source, spoiled):
            num_lines, has_returns = num_lines + 1, has_returns or "\r" in line.text.strip()
            yield line.text.replace("\r", " ")  # a stray one is white space
        if num_lines == 1 and has_returns:
            raise DataError(
                f"{source} is one line with carriage returns inside, as files with CR line ends "
                "are: convert them to LF (tr '\\r' '\\n' < OLD > NEW)"
            )
        return
    for record in read_records(source, spoiled):
        value = record.fields.get(field)
        where = f"{source}, line {record.line}"
        if field not in record.fields:
            raise DataError(
                f"{where}: no field '{field}' (it has {', '.join(record.fields) or 'none'}): "
                "name another with --corpus_field"
            )
        if not isinstance(value, str):
            raise DataError(f"{where}: '{field}' is a {type(value).__name__}, not text")
        if not is_utf8(value):
            raise DataError(f"{where}: '{field}' holds a NUL or half a surrogate pair")
        yield " ".join(value.split("\n"))


def _find_source(name: str) -> Path:
    if name.startswith(BUNDLED):
        return bundled_corpus_file(name.removeprefix(BUNDLED))
    path = Path(name).expanduser()
    parts = name.split("/")
    is_hub_name = len(parts) >= 3 and all(parts) and parts[0] not in (".", "..", "~")
    if path.exists() or not is_hub_name or path.parent.is_dir():
        return path
    return _fetch_from_hub(name, "/".join(parts[:2]), "/".join(parts[2:]))


def _fetch_from_hub(name: str, repo: str, file: str) -> Path:
    try:
        return fetch_file(repo, file)
    except hub_errors() as error:
        raise DataError(
            f"cannot find corpus '{name}': there is no such file here, and the hub says: "
            f"{hub_reason(error)} Give a local .txt or .jsonl file (or those with .gz), or a "
            "bundled: name (pgra data lists them)."
        ) from None
