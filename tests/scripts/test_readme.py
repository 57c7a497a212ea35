"""The README's commands and its example do what it says."""

import re
import shlex
from pathlib import Path

import pytest

from pgra.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted(page for place in ("*", "docs/*", "notes/*") for page in ROOT.glob(f"{place}.md"))
CSV_ROWS = [
    (f"{start} {noun} {end}", label)
    for start, end, label in (("Where is the", "?", "question"), ("There is the", ".", "statement"))
    for noun in ("river", "lake", "house", "street", "town", "film", "album", "year", "law", "king")
]


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.S | re.M)
    return [text for name, text in found if name == language]


def anchor(heading):
    """Give a heading's anchor as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(page, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        if target.startswith(("http:", "https:")):
            continue
        text = file.read_text() if fragment and file.is_file() else ""
        headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
        if not file.exists() or (fragment and fragment not in map(anchor, headings)):
            yield f"{page.name}: {target}"


def test_every_link_leads_somewhere(tmp_path):
    assert [link for page in PAGES for link in broken_links(page, page.read_text())] == []
    text = "# A head, [a](#a-head-ad) [b](gone.md) [c](#none)"  # the control
    page = tmp_path / "page.md"
    page.write_text("# A head: ad\n")
    assert list(broken_links(page, text)) == ["page.md: gone.md", "page.md: #none"]


def commands():
    text = "\n".join(blocks("")).replace("\\\n", " ")
    return [
        line
        for line in text.splitlines()
        if re.match(r"(pgra|python|accelerate launch|make|pip) ", line)
    ]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(("pgra", "accelerate"))])
def test_every_flag_of_a_command_is_in_its_help(command, capsys):
    """What accelerate launches is, of several processes, each the command of this name."""
    started = command.replace("launch -m index_build", "index").replace("launch train.py", "train")
    name, *rest = shlex.split(started, comments=True)[1:]
    word = rest[: {"ablate": 1, "memory": 2, "task": 1}.get(name, 0)]
    assert main([name, *word, "--help-all"]) == 0
    shown = capsys.readouterr().out
    flags = {flag.partition("=")[0] for flag in rest if flag.startswith("--")}
    assert {flag for flag in flags if not re.search(rf"{flag}\b", shown)} == set()


def write_own_task(folder):
    (block,) = blocks("yaml")
    (folder / "my_task.yaml").write_text(block)
    (table,) = blocks("csv")
    rows = [table.splitlines()[0], *(",".join(row) for row in CSV_ROWS)]
    for name in ("train.csv", "test.csv"):
        (folder / name).write_text("\n".join(rows) + "\n")


@pytest.mark.slow
def test_a_newcomer_validates_trains_predicts_and_reports(tmp_path, monkeypatch, capsys):
    """The README's commands on a task of one's own."""
    write_own_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    ours = [shlex.split(line, comments=True)[1:] for line in commands() if line.startswith("pgra ")]
    assert [words[0] for words in ours[:4]] == ["task", "train", "predict", "report"]
    for words in ours[:4]:
        assert main(words) == 0, words
    shown = capsys.readouterr().out
    assert "runs/my_task-head-seed0" in shown
    assert "Who wrote this ?" in shown
    assert "my_task" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_the_example_runs_and_each_part_shows_what_it_found(tmp_path, monkeypatch, capsys):
    (example,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    told, made = (re.sub(r"-?[\d.]+%?  ?", "", text) for text in (blocks("text")[0], shown))
    assert told == made  # but for last digits
