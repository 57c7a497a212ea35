import errno
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pgra import __version__
from pgra.cli import _OS_ERRORS, COMMANDS, main, run
from pgra.errors import ConfigError, unknown_name


def raising(error):
    def script(argv):
        raise error

    return script


def test_a_script_that_works_gives_its_code(capsys):
    assert run(lambda argv: len(argv), ["a", "b", "c"]) == 3
    assert capsys.readouterr().err == ""


def test_a_users_error_is_one_line(capsys):
    assert run(raising(ConfigError("k is 3:\n  lower it"))) == 2
    assert capsys.readouterr().err == "\npgra: error: k is 3: lower it\n"


def test_an_interrupt_says_how_to_go_on(capsys):
    assert run(raising(KeyboardInterrupt())) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err


def test_what_the_disk_refuses_is_one_line_each_with_its_own_way_out(capsys):
    told = {}
    for code in _OS_ERRORS:
        assert run(raising(OSError(code, os.strerror(code), "/some/file"))) == 2
        text = capsys.readouterr().err
        assert text.startswith("\npgra: error: cannot read or write /some/file: ")
        assert text.count("\n") == 2
        told[code] = text
    assert "the disk is full: make room" in told[errno.ENOSPC]
    assert len(set(told.values())) == len(told) - 1  # two numbers mean no permission


@pytest.mark.parametrize(
    "error",
    [
        Exception("No space left on device (os error 28)"),  # tokenizers
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),  # torch
    ],
)
def test_libraries_that_meet_a_full_disk_are_understood(error, capsys):
    assert run(raising(error)) == 2
    assert "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ValueError("ours"), OSError(errno.EIO, "broken"), RuntimeError("(os error 5)")]
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


def subcommands(*words):
    """Read the names under `commands:` in a command's help, and under theirs."""
    done = subprocess.run(
        [sys.executable, "-m", "pgra", *words, "--help"], capture_output=True, text=True, check=True
    )
    listed = done.stdout.partition("commands:\n")[2].partition("\n\n")[0]
    for line in listed.splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            yield (*words, line.split()[0])


TOP = list(subcommands())
NESTED = [words for command in ("index", "memory") for words in subcommands(command)]
SCRIPTS = [
    path
    for pattern in ("*.py", "ablations/*.py", "benchmarks/*.py", "index_build/__main__.py")
    for path in sorted(Path(__file__).parents[2].glob(pattern))
    if "from pgra.cli import" in path.read_text()
]


def test_the_lists_of_commands_are_read_whole():
    assert [name for (name,) in TOP] == list(COMMANDS)
    assert ("memory", "train-gud-ir") in NESTED
    assert ("index", "remove") in NESTED
    assert len(NESTED) >= 22
    assert {"train.py", "k.py", "rerank.py", "__main__.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("words", [*TOP, *NESTED, ("ablate", "k"), ("ablate", "kate_t6")], ids=str)
def test_every_command_has_help(words, capsys):
    assert main([*words, "--help"]) == 0
    assert "usage: " in capsys.readouterr().out


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
    heard = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (heard.returncode, heard.stderr) == (0, "")


def test_a_pipe_of_our_own_that_breaks_is_not_hidden():
    with pytest.raises(BrokenPipeError):
        run(raising(BrokenPipeError(errno.EPIPE, "ours")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["evaluate"], "--run is missing: give it (Folder of a finished run"),
        (["consistency"], "--runs is missing: give it (Finished runs"),
        (["consistency", "--runs", "runs"], "--output_dir is missing: give it (Where labels"),
    ],
)
def test_a_command_that_lacks_something_says_what(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_names_without_a_near_one_are_listed():
    assert unknown_name("fruit", "xyz", ["pear", "apple"]) == (
        "unknown fruit 'xyz'. Known: apple, pear."
    )
    assert unknown_name("fruit", "Pear", ["pear"]).startswith(
        "unknown fruit 'Pear'. Did you mean 'pear'?"
    )
    assert unknown_name("fruit", "pear", []) == "unknown fruit 'pear'. Known: none."


_LAYERS = """
import resource
from pgra.cli import run

def main(argv):
    for layer in range(20):
        tensors = [b"x" * (20 << 20) for _ in range(3)]
        del tensors
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return 0

run(main)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    """Three blocks of 20 MiB have 15,360 pages; taken anew by each layer, 20 times as many."""
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
    assert faults["ours"] < 2 * 15_360 < 10 * 15_360 < faults["theirs"]
