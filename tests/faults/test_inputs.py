"""Whatever stands in an outside file: it is read, or refused in one short line. Nothing else."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from readers import READERS, cases, check

from pgra.cli import main
from pgra.commands.common import typed_lines
from pgra.data.read import LINE_LIMIT, read_lines, table_rows
from pgra.errors import LONGEST_MESSAGE, ConfigError, DataError, ModelError

ANYTHING = st.binary(max_size=200) | st.text(max_size=200).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_or_refused(name, tmp_path_factory):
    folder, reader = tmp_path_factory.mktemp("any"), READERS[name]
    assert check(reader, reader.valid, folder) == ""  # the control: it does read
    spoilt = st.integers(0, 10**6).map(lambda number: next(cases(reader, seed=0, start=number)))

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(ANYTHING | spoilt)
    def any_bytes(data):
        check(reader, data, folder)

    any_bytes()


@pytest.mark.parametrize(
    ("name", "added", "told"),
    [
        ("task", b"\nanswer: 2024-13-45\n", "month must be in 1..12"),
        ("task", b"\nmetric: accuracy\nmetric: mcc\n", "the key 'metric' is a duplicate"),
        ("config", b"\nseed: " + b"9" * 6000, "Exceeds the lim"),
        ("config", b"\n#" + b"x" * (1 << 20), "larger than a YAML may be"),
        ("template", b'\nprompt: "{text:>999999999}"\n', "write {text} alone"),
        ("corpus jsonl", b'{"text": ' + b"[" * 100_000, "line 3: not JSON (nested too deeply)"),
        ("corpus jsonl", b'{"text": "a", "text": "b"}', "the key 'text' stands there twice"),
        ("events", b"[" * 100_000, "line 2: not JSON (nested too deeply)"),
        ("modules", b"[" * 100_000, "cannot be read"),
        ("qrels", b"9 0 d1 " + b"9" * 5000, "cannot be read (ValueError: "),
    ],
)
def test_what_is_wrong_is_named(name, added, told, tmp_path):
    valid = b"labels: [a, b]" if name == "template" else READERS[name].valid
    assert told in check(READERS[name], valid + added, tmp_path)


def test_a_message_keeps_its_beginning_and_its_way_out():
    text = "corpus.txt, line 3: " + "x" * 10_000 + ": give another"
    told = str(DataError(text))
    assert len(told) <= LONGEST_MESSAGE
    assert told.startswith("corpus.txt, line 3: x")
    assert told.endswith("x: give another")
    assert str(DataError(text[:200])) == text[:200]
    assert len(str(ModelError(text[:900]))) == 900  # paths and commands of ours


def _peak(path, megabytes):
    """Return what a process that reads a file's lines says, and its peak memory in MB."""
    program = (
        "import resource, sys; from pathlib import Path; from pgra.data.read import read_lines\n"
        "try: print(sum(len(line.text) for line in read_lines(Path(sys.argv[1]))))\n"
        "except Exception as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    env = {**os.environ, LINE_LIMIT: str(megabytes)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=env, check=True, capture_output=True
    )
    told, peak = done.stdout.decode().splitlines()
    return told, int(peak)


@pytest.mark.slow
def test_the_longest_line_is_what_was_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(LINE_LIMIT, "1")
    path = tmp_path / "t.txt"
    path.write_bytes(b"a" * ((1 << 20) - 1) + b"\nb")
    assert [len(line.text) for line in read_lines(path)] == [1 << 20, 1]
    path.write_bytes(b"a\n" + b"a" * (1 << 20) + b"\nb")
    with pytest.raises(DataError, match=r"line 2: longer than 1 MB.* raise --max_line_mb"):
        list(read_lines(path))
    table = tmp_path / "t.csv"
    table.write_bytes(b'text\n"' + b"a\n" * (1 << 20))  # a quoted cell goes on over lines
    with pytest.raises(DataError, match="longer than 1 MB"):
        list(table_rows(table, "csv", ()))
    monkeypatch.setenv(LINE_LIMIT, "0")
    with pytest.raises(ConfigError, match="max_line_mb is '0'"):
        list(read_lines(path))
    assert main(["models", "--max_line_mb", "many"]) == 2
    assert "max_line_mb is 'many': give a whole number" in capsys.readouterr().err
    assert main(["models", "--max-line-mb=3"]) == 0
    assert os.environ[LINE_LIMIT] == "3"
    assert len(list(read_lines(path))) == 3


def test_a_piped_line_without_end_is_refused_where_it_ends(monkeypatch):
    monkeypatch.setenv(LINE_LIMIT, "1")
    piped = io.BytesIO(b"a\r\n" + b"b" * ((1 << 20) - 1) + b"\n" + b"c" * (3 << 20))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped))
    lines = typed_lines()
    assert next(lines) == "a"
    assert len(next(lines)) == (1 << 20) - 1  # and its end
    with pytest.raises(DataError, match="standard input, line 3: longer than 1 MB"):
        next(lines)
    assert piped.tell() < 3 << 20  # the rest is not read
    for letter, is_read in (("e", True), ("\N{LATIN SMALL LETTER E WITH ACUTE}", False)):  # 2 bytes
        piped = io.BytesIO((letter * (1 << 19) + letter).encode())
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped))
        with contextlib.nullcontext() if is_read else pytest.raises(DataError, match="longer than"):
            assert len(list(typed_lines())) == 1
