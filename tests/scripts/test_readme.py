"""The README's commands and its example do what it says."""

import re
import shlex
from pathlib import Path

import pytest

from index_build.__main__ import BuildArguments
from pgra.arguments import parse_arguments
from pgra.commands.common import SECTIONS
from pgra.commands.evaluate import EvaluateArguments
from pgra.config import CorpusArguments, RetrieverArguments, RuntimeArguments
from pgra.data.tasks import load_task
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.series import SeriesArguments

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = {
    "train.py": [*SECTIONS.values(), SeriesArguments, ReaderTrainingArguments],
    "evaluate.py": [EvaluateArguments],
    "index_build": [RuntimeArguments, CorpusArguments, RetrieverArguments, BuildArguments],
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README


def commands():
    text = "\n".join(blocks("")).replace("\\\n", " ")
    return [
        line
        for line in text.splitlines()
        if re.match(r"(python|accelerate launch|make|pip) ", line)
    ]


def test_every_make_target_is_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert {"demo", "test"} <= named <= set(targets)


@pytest.mark.parametrize(
    "command", [c for c in commands() if c.startswith(("python", "accelerate"))]
)
def test_every_flag_of_a_command_is_known(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    program = next(name for name in PROGRAMS if name in words)
    argv = words[words.index(program) + 1 :]
    parsed = parse_arguments(PROGRAMS[program], argv, prog=program, description="")
    assert len(parsed) == len(PROGRAMS[program])


def test_the_first_task_of_a_newcomer_is_whole(tmp_path):
    (block,) = (b for b in re.findall(r"^  ```yaml\n(.*?)^  ```", README, flags=re.S | re.M))
    path = tmp_path / "my_task.yaml"
    path.write_text("\n".join(line[2:] for line in block.splitlines()))
    task = load_task(str(path))
    assert (task.inputs, task.labels, task.metric) == (
        ("text",),
        ("question", "statement"),
        "accuracy",
    )


@pytest.mark.slow
def test_the_example_runs_and_shows_four_passages(tmp_path, monkeypatch, capsys):
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 25
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out.strip().splitlines()
    assert len(shown) == 4
    scores = [float(line.split("  ")[0]) for line in shown]
    assert scores == sorted(scores, reverse=True)
    assert all(len(line.split("  ", 1)[1].split()) >= 5 for line in shown)
