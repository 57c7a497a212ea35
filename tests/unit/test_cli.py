import errno
import logging
import subprocess
import sys

import pytest
import torch

from pgra.cli import main, run
from pgra.errors import ConfigError


def raising(error):
    def script(argv):
        raise error

    return script


LOST, MORE = (
    "what was finished is kept, and the same command continues",
    "CUDA kernel errors might be",
)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("k is 3:\n  lower it"), 2, "\npgra: error: k is 3: lower it\n"),
        (KeyboardInterrupt(), 130, "the same command continues where it stopped"),
        (
            OSError(errno.ENOSPC, "no", "/some/file"),
            2,
            "cannot use /some/file: No space left on device",
        ),
        (OSError("2626 requested and 2016 written"), 2, "a file: No space left on device"),
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
        RuntimeError("Expected all tensors to be on one device, but found cuda:0 and cpu"),
    ],
)
def test_our_own_mistakes_are_not_hidden(error):
    with pytest.raises(type(error)):
        run(raising(error))


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps", "tpu", ""])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    device, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for words in (["train", "--task", "sst2"], ["index"], ["search", "x"]):
        assert main([*words, "--device", device]) == 2
        assert f"cannot use device '{device}': " in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["-v", "-q"], ["--quiet"]])
def test_how_loud_may_stand_anywhere(words):
    for given in ([*words, "a", "--b"], ["a", *words, "--b"], ["a", "--b", *words]):
        seen = []
        assert run(lambda rest, seen=seen: seen.extend(rest) or 0, given) == 0
        assert seen == ["a", "--b"]
        assert logging.getLogger("pgra").level == logging.ERROR


def test_a_command_that_shares_no_work_refuses_several_processes(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["memory", "add", "a question", "a correction"]) == 2
    assert "pgra memory runs in one process, not 2" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


LIGHT = """
import sys, pgra.cli
words = [["list"]] + [
    [*each, "--help-all"] for each in (
        *([name] for name in pgra.cli.COMMANDS),
        ["ablate", "k"], ["memory", "lab", "stream"],
        *(["train", "--method", name] for name in ("icl", "kate", "knn", "ralm")),
        ["search", "--reranker", "cross-encoder"], ["search", "--retriever", "bm25"],
    )
]
for each in words:
    assert pgra.cli.main(each) == 0, each
    assert not {"torch", "transformers", "datasets", "faiss"} & {*sys.modules}, each
"""


@pytest.mark.slow
def test_listings_and_the_help_of_every_command_are_light():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CORE = """
import sys
sys.modules |= dict.fromkeys(
    ("accelerate", "datasets", "faiss", "huggingface_hub", "jinja2", "pyarrow", "safetensors",
     "scipy", "sentence_transformers", "torch", "transformers")  # as if not installed
)
import pgra
assert not {"numpy", "pgra.types"} & {*sys.modules}
pgra.Candidates
assert "pgra.types" in sys.modules
import pgra.cli
assert pgra.cli.main(["memory", "add", "Where is it?", "On the shelf."]) == 0
assert "On the shelf." in pgra.Memory().prompt("Where is it?")
pool = [(text, "good") for text in ("red apples", "green pears", "blue plums", "ripe figs")]
chosen = pgra.ExemplarSelector(pool, encoder="bm25").select("which pears", k=1)
assert chosen == [("green pears", "good")], chosen
open("corpus.txt", "w").write("a town")
assert pgra.cli.main(["search", "x", "--corpus", "corpus.txt", "--encoder", "e"]) == 2
assert pgra.cli.main(["memory", "search", "x", "--encoder", "e"]) == 2
for use in (pgra.Memory, lambda encoder: pgra.ExemplarSelector(pool, encoder=encoder).select("x")):
    try:
        use(encoder="e")
    except pgra.PgraError as error:
        assert "pip install '.[lm]'" in str(error), error
pgra.Encoder
"""


@pytest.mark.slow
def test_the_memory_and_words_need_none_of_the_extra_lm(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CORE], capture_output=True, text=True, cwd=tmp_path
    )
    *commands, python = [line for line in done.stderr.splitlines() if "'.[lm]'" in line]
    assert [line.startswith("pgra: error: ") for line in commands] == [True, True]
    assert python.startswith("ModuleNotFoundError: "), done.stderr  # the last line, of Encoder
