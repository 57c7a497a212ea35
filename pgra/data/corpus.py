"""The searched collection: passages from a source, memory-mapped and fetched by row.

A passage is one line, or one value of a JSON or parquet field: white space around it is dropped,
and a line break inside a value becomes a space. With `passage_words` a line is a document, and its
passages are blocks of so many words that do not overlap (Karpukhin et al. 2020, section 4.1), the
last as long as what is left. Blank lines and missing values are dropped, and so are lines that are
not UTF-8, if they are at most one in a hundred. Of equal passages the first stays. All are counted;
`strict` refuses them. Several sources are one corpus: their passages in the order of the sources,
so that one more adds rows behind.
"""

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from pgra.config import CorpusArguments
from pgra.data.build import build_once
from pgra.data.seen import SeenTexts
from pgra.data.sources import BUNDLED, Source, find_source
from pgra.errors import ArtifactError, DataError
from pgra.io import Manifest, artifact_dir, read_manifest
from pgra.types import Json, Rows

logger = logging.getLogger(__name__)

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
    sources = [find_source(name) for name in args.sources]
    kinds, identities = [s.kind for s in sources], [s.identity for s in sources]
    fields: dict[str, Json] = {
        "source": identities[0] if len(sources) == 1 else identities,
        "kind": kinds[0] if len(sources) == 1 else kinds,
        "field": None if {*kinds} == {"txt"} else args.corpus_field,
        "max_passages": args.max_passages,
        "drop_duplicates": args.drop_duplicates,
    }
    if args.passage_words is not None:  # folders of corpora made without it keep their names
        fields["passage_words"] = args.passage_words
    name = Path(args.sources[0].removeprefix(BUNDLED)).name.split(".")[0].replace(":", "-")
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
    pairs = zip(args.sources, checksums, strict=True)
    return [name for name, checksum in pairs if find_source(name).identity != checksum]


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
    """Streams sources into an Arrow file, in memory that does not grow with them."""

    def __init__(self, args: CorpusArguments, sources: Sequence[Source], *, is_told: bool) -> None:
        self.args = args
        self.is_told = is_told
        self.sources = sources
        self.where = ", ".join(source.where for source in sources)
        self.sha256 = hashlib.sha256()
        self.rows = self.blank = self.duplicates = self.cut = 0

    def write(self, folder: Path) -> Mapping[str, Json]:
        with pa.OSFile(str(folder / _FILE), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as sink:
            batch: list[str] = []
            for kept in self._kept(SeenTexts(folder)):
                batch += kept
                while len(batch) >= _BATCH_ROWS:
                    self._flush(sink, batch[:_BATCH_ROWS])
                    del batch[:_BATCH_ROWS]
            self._flush(sink, batch)
        for source in self.sources:
            source.spoiled.check()
        if not self.rows:
            raise DataError(f"{self.where} holds no passage: all of its lines are blank")
        self._tell()
        return {
            "rows": self.rows,
            "blank": self.blank,
            "duplicates": self.duplicates,
            "not_utf8": sum(source.spoiled.count for source in self.sources),
            "sha256": self.sha256.hexdigest(),
        }

    def _tell(self) -> None:
        if self.args.passage_words is not None and not self.cut:
            logger.warning(
                "corpus %s: no line has more than %d words, so passage_words cuts nothing; a line "
                "must be a document",
                self.where,
                self.args.passage_words,
            )
        logger.log(
            logging.INFO if self.is_told else logging.DEBUG,
            "corpus %s: %d passages, %d blank lines dropped, %d duplicates %s",
            self.where,
            self.rows,
            self.blank,
            self.duplicates,
            "dropped" if self.args.drop_duplicates else "kept",
        )
        for source in self.sources:
            if source.spoiled.count:
                told = source.spoiled
                logger.warning("corpus: %d lines dropped, as %s", told.count, told.first)

    def _flush(self, sink: Any, batch: list[str]) -> None:
        if batch:
            sink.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema=_SCHEMA))
            self.sha256.update("".join(f"{passage}\n" for passage in batch).encode())
            self.rows += len(batch)

    def _kept(self, seen: SeenTexts) -> Iterator[list[str]]:
        """Give what is kept, some passages at a time; no more is read than is needed for them."""
        passages, rest = self._passages(), self.args.max_passages or sys.maxsize
        with self._bar() as bar:
            num_seen = 0
            while batch := list(islice(passages, min(_BATCH_ROWS, rest))):
                is_new = seen.add(batch)
                self.duplicates += len(batch) - int(is_new.sum())
                if self.args.drop_duplicates:
                    kept = [text for text, new in zip(batch, is_new, strict=True) if new]
                else:
                    kept = batch
                yield kept
                rest -= len(kept)
                num_seen += len(batch)
                self._show(bar, num_seen)

    def _bar(self) -> Any:
        """Make a bar of what is read of the source; a short corpus shows none."""
        units = {source.unit for source in self.sources}
        return tqdm(
            total=sum(source.size for source in self.sources),
            desc="read",
            unit=units.pop() if len(units) == 1 else "",
            unit_scale=True,
            delay=2,
            disable=not self.is_told,
        )

    def _show(self, bar: Any, num_seen: int) -> None:
        seconds = bar.format_dict["elapsed"]
        speed = f"{num_seen / seconds:,.0f} texts/s" if seconds else ""
        bar.set_postfix_str(f"{num_seen:,} texts, {speed}", refresh=False)
        bar.update(sum(source.position.done for source in self.sources) - bar.n)

    def _passages(self) -> Iterator[str]:
        for source in self.sources:
            for text in source.texts(self.args.corpus_field):
                yield from self._cut(text)

    def _cut(self, text: str) -> list[str]:
        document = text.strip()
        if not document:
            self.blank += 1
            return []
        if self.args.passage_words is None:
            return [document]
        blocks = cut_words(document, self.args.passage_words)
        self.cut += len(blocks) > 1
        return blocks


def cut_words(text: str, num_words: int) -> list[str]:
    """Cut a text into blocks of so many words, one space between two; the last holds the rest."""
    words = text.split()
    starts = range(0, len(words), num_words)
    return [" ".join(words[start : start + num_words]) for start in starts]
