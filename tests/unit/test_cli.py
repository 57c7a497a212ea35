import errno
import os
import platform
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pgra import __version__
from pgra.cli import COMMANDS, main, run
from pgra.errors import ConfigError


def raising(error):
    def script(argv):
        raise error

    return script


FULL = "the disk is full: make room"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("k is 3:\n  lower it"), 2, "\npgra: error: k is 3: lower it\n"),
        (KeyboardInterrupt(), 130, "the same command goes on where it stopped"),
        (OSError(errno.EACCES, "no", "/some/file"), 2, "cannot read or write /some/file: "),
        (OSError(errno.ENOSPC, "no", "/some/file"), 2, FULL),
        (Exception("No space left on device (os error 28)"), 2, FULL),  # tokenizers
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64"), 2, FULL),
    ],
)
def test_what_ends_a_command_is_one_line_and_a_code(error, code, told, capsys):
    assert run(raising(error)) == code
    text = capsys.readouterr().err
    assert told in text
    assert text.count("\n") == 2


@pytest.mark.parametrize(
    "error",
    [ValueError("ours"), OSError(errno.EIO, "broken"), BrokenPipeError(errno.EPIPE, "ours")],
)
def test_our_own_mistakes_are_not_hidden(error):
    with pytest.raises(type(error)):
        run(raising(error))


def test_kernels_are_bounded_unless_the_user_says_how_many(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    seen = []
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    run(lambda _: seen.extend(os.environ[name] for name in names) or 0)
    assert seen == ["128", "7"]


def test_no_word_is_help_and_the_version_is_told(capsys):
    assert main([]) == main(["--help"]) == 0
    first, second = capsys.readouterr().out.split("usage:")[1:]
    assert first == second
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pgra {__version__}\n"


SCRIPTS = [
    path
    for pattern in ("*.py", "ablations/*.py", "benchmarks/*.py", "index_build/__main__.py")
    for path in sorted(Path(__file__).parents[2].glob(pattern))
    if "from pgra.cli import" in path.read_text()
]


def test_every_command_has_help_and_those_that_a_help_names_too(capsys):
    left, met = [(), ("ablate", "k")], set()
    while left:
        words = left.pop()
        assert main([*words, "--help"]) == 0, words
        told = capsys.readouterr().out
        assert "usage: " in told, words
        met.add(words)
        if words not in ((), ("data",), ("index",), ("memory",)):
            continue
        listed = told.partition("commands:\n")[2].partition("\n\n")[0]
        left += [(*words, name) for name in re.findall(r"^  (\S+)", listed, re.MULTILINE)]
    assert {words for words in met if len(words) == 1} == {(name,) for name in COMMANDS}
    assert {("memory", "train-gud-ir"), ("index", "remove"), ("data", "claims")} <= met
    assert {"train.py", "k.py", "rerank.py", "__main__.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_script_has_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as leave:
        runpy.run_path(str(script), run_name="__main__")
    assert leave.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_reader_that_leaves_ends_a_listing_without_a_word():
    command = [sys.executable, "-m", "pgra", "data"]
    read, write = os.pipe()
    os.close(read)
    alone = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (alone.returncode, alone.stderr) == (141, "")


_LAYERS = """
import resource
from pgra.cli import run

def main(argv):
    for layer in range(8):
        tensors = [b"x" * (20 << 20) for _ in range(3)]
        del tensors
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return 0

run(main)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    """Three blocks of 20 MiB have 15,360 pages; taken anew by each layer, 8 times as many."""
    faults = {}
    for name, theirs in (("ours", {}), ("theirs", {"MALLOC_TRIM_THRESHOLD_": "131072"})):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
        told = subprocess.run(
            [sys.executable, "-c", _LAYERS],
            env={**environ, **theirs},
            capture_output=True,
            text=True,
            check=True,
        )
        faults[name] = int(told.stdout)
    assert faults["ours"] < 2 * 15_360 < 6 * 15_360 < faults["theirs"]
