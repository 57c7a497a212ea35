import errno
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pgra import __version__
from pgra.cli import COMMANDS, main, run
from pgra.errors import ArtifactError, ConfigError, PgraError, unknown_name


def raising(error):
    def script(argv):
        raise error

    return script


def test_a_script_that_works_gives_its_code(capsys):
    assert run(lambda argv: len(argv), ["a", "b", "c"]) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [ConfigError, ArtifactError, PgraError])
def test_a_users_error_is_one_line(kind, capsys):
    assert run(raising(kind("k is 3:\n  lower it"))) == 2
    assert capsys.readouterr().err == "\npgra: error: k is 3: lower it\n"


def test_an_interrupt_says_how_to_go_on(capsys):
    assert run(raising(KeyboardInterrupt())) == 130
    assert "the same command goes on where it stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "the disk is full: make room"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EACCES, "no permission: choose a folder you may write to"),
        (errno.EROFS, "read-only: choose"),
        (errno.EFBIG, "larger than a file may be here"),
        (errno.ENOTDIR, "a part of the path is a file"),
        (errno.EISDIR, "it is a folder"),
        (errno.EEXIST, "it is there, and is no folder"),
        (errno.ENOENT, "does not exist or was removed"),
        (errno.ENAMETOOLONG, "the name is too long"),
    ],
)
def test_what_the_disk_refuses_is_one_line(code, message, capsys):
    assert run(raising(OSError(code, os.strerror(code), "/some/file"))) == 2
    told = capsys.readouterr().err
    assert told.startswith("\npgra: error: cannot read or write /some/file: ")
    assert message in told
    assert told.count("\n") == 2


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


def test_a_real_file_in_the_way_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(lambda argv: (tmp_path / "file" / "x").mkdir(parents=True) or 0) == 2
    assert f"{tmp_path / 'file' / 'x'}: a part of the path is a file" in capsys.readouterr().err


def test_kernels_are_bounded_unless_the_user_says_how_many(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    seen = []
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    run(lambda _: seen.extend(os.environ[name] for name in names) or 0)
    assert seen == ["128", "7"]


def test_help_names_every_command(capsys):
    assert main([]) == main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in COMMANDS)
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


@pytest.fixture
def memory_of_two(tmp_path):
    path = tmp_path / "memory.sqlite"
    for question in ("what is near < fast > ?", "what is near < slow > ?"):
        assert main(["memory", "add", question, "a synonym", "--memory", str(path)]) == 0
    return path


@pytest.mark.parametrize("words", [["--help"], ["data"], ["models"], ["memory", "list"]], ids=str)
def test_a_reader_that_leaves_ends_a_listing_without_a_word(words, memory_of_two):
    if words[0] == "memory":
        words = [*words, "--memory", str(memory_of_two)]
    command = [sys.executable, "-m", "pgra", *words]
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


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'. Did you mean 'train'?" in capsys.readouterr().err


def test_a_commands_own_errors_are_one_line(capsys):
    assert main(["evaluate"]) == 2
    assert "--run is missing: give the folder of a finished run" in capsys.readouterr().err


def test_consistency_is_a_command_of_its_own(capsys):
    assert main(["consistency"]) == 2
    assert "--runs is missing: give the folders of finished runs" in capsys.readouterr().err
    assert main(["consistency", "--runs", "runs"]) == 2
    assert "--output_dir is missing: say where labels, tables and plots go" in (
        capsys.readouterr().err
    )


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
