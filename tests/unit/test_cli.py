import contextlib
import errno
import io
import logging
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pgra import __version__
from pgra.cli import COMMANDS, main, run
from pgra.errors import ConfigError
from pgra.help import GROUPS


def raising(error):
    def script(argv):
        raise error

    return script


FULL = "No space left on device (ENOSPC)"
LOST, MORE = (
    "what was finished is kept, and the same command goes on",
    "CUDA kernel errors might be",
)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("k is 3:\n  lower it"), 2, "\npgra: error: k is 3: lower it\n"),
        (KeyboardInterrupt(), 130, "the same command goes on where it stopped"),
        (OSError(errno.ENOSPC, "no", "/some/file"), 2, FULL),
        (OSError(errno.ELOOP, "no"), 2, "cannot use a file: Too many lev"),
        (Exception("No space left on device (os error 28)"), 2, FULL),  # tokenizers
        (torch.AcceleratorError(f"CUDA error: device-side assert triggered\n{MORE}"), 2, LOST),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 2, "smaller batc"),
        (MemoryError("Unable to allocate 8 PiB"), 2, "memory is full (Unable to allocate 8 PiB): "),
    ],
)
def test_what_ends_a_command_is_one_line_and_a_code(error, code, told, capsys):
    assert run(raising(error)) == code
    text = capsys.readouterr().err
    assert told in text
    assert text.count("\n") == 2


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        RuntimeError("ours"),
        RuntimeError("Expected all tensors to be on one device, but found cuda:0 and cpu"),
    ],
)
def test_our_own_mistakes_are_not_hidden(error):
    with pytest.raises(type(error)):
        run(raising(error))


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


def helped(text):
    """Take a help apart: its flags by the group they stand in, in order."""
    groups = {}
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][A-Za-z ]*:", line):
            flags = groups.setdefault(line[:-1], [])
        elif found := re.match(r"  (?:-\w, )?--([\w-]+)(?= |$)", line):
            flags.append(found[1])
    return groups


FEWER = {"train": 30, "demo": 30, "plan": 30, "icl": 35, "ablate": 40, "rerank": 30}


@pytest.mark.slow
def test_every_command_and_all_words_below_have_help_in_groups(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    left, met = [(), ("ablate", "k"), ("ablate", "kate_t2")], set()
    while left:
        words = left.pop()
        assert len(words) <= 2, words
        shown = {}
        for ask in ("--help", "--help-all"):
            assert main([*words, ask]) == 0, words
            told = capsys.readouterr().out
            assert told.startswith(f"usage: pgra {words[0] if words else ''}".rstrip())
            groups = {k: v for k, v in helped(told).items() if k not in ("Examples", "Example")}
            below = re.search(r"\nCommands:\n  COMMAND\n(.*?)\n\n", told, re.S)
            if below and words not in met:
                left += [(*words, name) for name in re.findall(r"^    (\S+)", below[1], re.M)]
            titles = [name for name in groups if name != "Commands"]
            assert titles == [name for name in GROUPS if name in titles], words  # in their order
            flags = [flag for title in titles for flag in groups[title]]
            assert len(set(flags)) == len(flags), words
            assert {"quiet", "verbose", "help", "help-all"} <= set(groups["General"])
            assert told.count("(default:") <= len(flags)
            shown[ask] = flags
            met.add(words)
        assert set(shown["--help"]) <= set(shown["--help-all"])
        if words and words[0] in FEWER:
            assert len(shown["--help"]) <= FEWER[words[0]] < len(shown["--help-all"]), words
    assert {words for words in met if len(words) == 1} == {(name,) for name in COMMANDS}
    assert {("memory", "train-gud-ir"), ("index", "add"), ("data", "claims")} <= met
    assert {"train.py", "k.py", "rerank.py", "__main__.py"} <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ([], logging.INFO),
        (["-q"], logging.ERROR),
        (["--quiet"], logging.ERROR),
        (["-v"], logging.DEBUG),
        (["--log_level", "warning"], logging.WARNING),
        (["--log-level=warning"], logging.WARNING),
        (["-v", "-q"], logging.ERROR),  # the last one wins
    ],
)
def test_how_loud_stands_anywhere_and_is_taken_off(words, level):
    for given in ([*words, "a", "--b"], ["a", *words, "--b"], ["a", "--b", *words]):
        seen = []
        assert run(lambda rest, seen=seen: seen.extend(rest) or 0, given) == 0
        assert seen == ["a", "--b"]
        assert logging.getLogger("pgra").level == level


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_script_has_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as leave:
        runpy.run_path(str(script), run_name="__main__")
    assert leave.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_leaves_ends_a_listing_without_a_word():
    command = [sys.executable, "-m", "pgra", "data"]
    read, write = os.pipe()
    os.close(read)
    alone = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (alone.returncode, alone.stderr) == (141, "")


@pytest.mark.parametrize(
    "words",
    [
        ["memory", "add", "a question", "a correction"],
        ["index", "add", "none", "--corpus", "none.txt"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_shares_no_work_refuses_several_processes(
    words, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    told = f"pgra {words[0]}{' add' if words[0] == 'index' else ''} runs in one process"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(words) == 2
    assert f"{told}, and WORLD_SIZE says that there are 2" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("WORLD_SIZE", "1")
    main(words)
    assert told not in capsys.readouterr().err


# What a command refuses to be without, before it looks at the device.
NEEDED = {
    ("ablate",): ["k", "--output_dir", "out"],
    ("consistency",): ["--runs", "run", "--output_dir", "out"],
    ("evaluate",): ["--run", "run"],
    ("index", "add"): ["--index_dir", "index", "--corpus", "new.txt"],
    ("memory", "chat"): ["--lm", "some-lm"],
    ("memory", "stream"): ["--stream", "stream.jsonl", "--lm", "some-lm"],
    ("memory", "web"): ["--lm", "some-lm"],
    ("predict",): ["--run", "run"],
}


def device_flags():
    """Give each command, and word below it, that takes --device, with no other word."""
    left, found = [(name,) for name in COMMANDS], []
    while left:
        words = left.pop()
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            main([*words, "--help-all"])
        found += [words] if "--device " in told.getvalue() else []
        below = re.search(r"\nCommands:\n  COMMAND\n(.*?)\n\n", told.getvalue(), re.S)
        if below and len(words) == 1:
            left += [(*words, name) for name in re.findall(r"^    (\S+)", below[1], re.M)]
    return sorted(found)


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_refused_by_every_command_before_anything_is_read(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    commands = device_flags()
    assert {("train",), ("icl",), ("rerank",), ("search",), ("predict",)} <= {*commands}
    assert len(commands) > 15
    for words in commands:
        for device in ("cuda", "cuda:7", "mps", "tpu", ""):
            code = main([*words, *NEEDED.get(words, ()), "--device", device])
            told = capsys.readouterr().err
            assert (code, told.count("\n")) == (2, 2), (words, told)
            assert f"cannot use device '{device}': " in told, (words, told)
            assert "Use auto or cpu." in told
    assert list(tmp_path.iterdir()) == []


def test_a_shell_gets_its_completion(capsys):
    assert main(["--print-completion", "bash"]) == 0
    assert "consistency" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["strict", "surrogateescape", "xmlcharrefreplace"])
def test_what_standard_output_cannot_encode_is_written_as_a_sign(monkeypatch, asked):
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="ascii", errors=asked))
    assert run(lambda _: sys.stdout.write("good 👍 naïve"), []) == 12
    sign = rb"good \U0001f44d na\xefve"
    other = b"good &#128077; na&#239;ve"  # what was asked for stays
    assert kept.getvalue().strip() == (other if asked == "xmlcharrefreplace" else sign)


@pytest.mark.slow
def test_closed_streams_and_an_odd_encoding_are_no_mistake(tmp_path):
    def call(line, **environment):
        line = f"{line.replace('pgra', f'{sys.executable} -m pgra')}; exit $?"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
        return subprocess.run(
            ["sh", "-c", line],
            **{"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "check": False},
        )

    for line in ("pgra models >&-", "pgra --version >&- 2>&-", "pgra models <&-"):
        called = call(line)
        assert (called.returncode, called.stderr) == (0, "")
    called = call("pgra task nothing >&- 2>&-")
    assert called.returncode == 2
    called = call('pgra memory add "é" "ü" && pgra memory list', PYTHONIOENCODING="ascii")
    assert (called.returncode, called.stderr) == (0, "")
    assert '"\\xe9" -> "\\xfc"' in called.stdout


HELPS = """
import sys, pgra.cli
words = [[name] for name in pgra.cli.COMMANDS] + [
    ["ablate", "k"], ["memory", "stream"], ["memory", "train-gud-ir"],
    *(["train", "--method", name] for name in ("icl", "kate", "knn", "lm-bff", "rag", "ralm")),
    ["rerank", "--reranker", "cross-encoder"], ["search", "--retriever", "bm25"],
]
for each in words:
    assert pgra.cli.main([*each, "--help-all"]) == 0, each
    assert not {"torch", "transformers"} & {*sys.modules}, each
"""


@pytest.mark.slow
def test_the_help_of_every_command_needs_neither_torch_nor_transformers():
    done = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "All other arguments of transformers.TrainingArguments are taken" in done.stdout
