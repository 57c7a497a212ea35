"""Reading text files: UTF-8 lines, plain or gzip, with errors that point at the place."""

import difflib
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, cast

from pgra.errors import DataError


class NotUtf8Error(DataError):
    """A line that is not UTF-8; what stands around it may be."""


@dataclass(frozen=True)
class Line:
    """One line of a file.

    Attributes:
        number: From 1, as editors count.
        text: With its line break, if it has one.
    """

    number: int
    text: str


@dataclass(frozen=True)
class Record:
    """One JSON object of a file.

    Attributes:
        line: The line it stands on, from 1.
        fields: Its values by name.
    """

    line: int
    fields: dict[str, object]


def check_file(path: Path, kinds: Sequence[str]) -> str:
    """Check that a file can be read, and say of what kind it is.

    Args:
        path: A file; `.gz` may follow its suffix.
        kinds: Accepted suffixes without the dot, such as ("txt", "jsonl").

    Returns:
        Its kind: the suffix without the dot and without `.gz`.

    Raises:
        DataError: If it is missing, a folder, empty or of another kind.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a file inside it")
    if not path.is_file():
        raise DataError(f"{path} does not exist.{_near_files(path)}")
    suffixes = [s.lower().lstrip(".") for s in path.suffixes if s.lower() != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    if kind not in kinds:
        accepted = ", ".join(f".{k}" for k in kinds)
        raise DataError(
            f"{path} has a suffix that is not read here: use {accepted}, or those with .gz"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return kind


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f" Neither does the folder {path.parent}."
    names = [p.name for p in path.parent.iterdir() if p.is_file()]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f" Near it: {', '.join(near)}." if near else ""


@dataclass
class Spoiled:
    """Lines of a file that are not UTF-8 and were left out.

    A few are damage, as web text has. A file with more than one in `MOST` is in another encoding.

    Attributes:
        lines: Lines read so far, these included.
        count: How many were left out.
        first: What is wrong with the first of them.
    """

    MOST: ClassVar[int] = 100
    lines: int = 0
    count: int = 0
    first: DataError | None = None

    def add(self, error: DataError) -> None:
        """Count a line that is left out."""
        self.count += 1
        self.first = self.first or error

    def check(self) -> None:
        """Refuse a file of another encoding.

        Raises:
            DataError: Of the first such line.
        """
        if self.first is not None and self.count * self.MOST > self.lines:
            raise self.first


def read_lines(path: Path, spoiled: Spoiled | None = None) -> Iterator[Line]:
    """Give a file's lines; memory does not grow with the file. A byte order mark is dropped.

    Args:
        path: The file.
        spoiled: Counts the lines that are not UTF-8, which are left out; None refuses them.

    Raises:
        DataError: If it is cut short, not gzip, binary or not UTF-8 (line and byte are named).
    """
    try:
        with _open_bytes(path) as file:
            for number, raw in enumerate(file, 1):
                if spoiled is None:
                    yield Line(number, _decode(path, number, raw))
                    continue
                spoiled.lines = number
                try:
                    line = Line(number, _decode(path, number, raw))
                except NotUtf8Error as error:
                    spoiled.add(error)
                else:
                    yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is cut short or is not gzip ({error}): fetch it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _open_bytes(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _decode(path: Path, number: int, raw: bytes) -> str:
    if b"\0" in raw:
        raise DataError(
            f"{path}, line {number}: a NUL byte, so this is a binary or UTF-16 file; "
            "save it as UTF-8 text"
        )
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise NotUtf8Error(
            f"{path}, line {number}, byte {error.start + 1}: 0x{raw[error.start]:02x} is not "
            "UTF-8; convert the file (iconv -f ENCODING -t UTF-8)"
        ) from None


def is_utf8(text: str) -> bool:
    """Say whether a text can be kept as UTF-8 text: without NUL and half surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def read_records(path: Path, spoiled: Spoiled | None = None) -> Iterator[Record]:
    """Give a jsonl file's objects; blank lines are skipped.

    Args:
        path: The file.
        spoiled: As `read_lines` takes it.

    Raises:
        DataError: If a line is not a JSON object, or as `read_lines`.
    """
    for line in read_lines(path, spoiled):
        if not line.text.strip():
            continue
        try:
            value = json.loads(line.text)
        except ValueError as error:
            raise DataError(f"{path}, line {line.number}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise DataError(
                f"{path}, line {line.number}: a {type(value).__name__}, not a JSON object"
            )
        yield Record(line.number, value)
