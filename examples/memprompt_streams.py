"""MemPrompt's 300-step streams as `pgra memory lab stream` reads them, from a clone of its release.

    git clone https://github.com/madaan/memprompt
    python memprompt_streams.py memprompt    # linguistic_300.jsonl, hin_, pun_, synthetic_gpt3_

The release keeps words and the forms of questions apart; its own forms are filled here. It cuts a
scrambled word of type randsym at its first space, and so do these files. Guide: docs/reproduce.md.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pgra.cli import run
from pgra.errors import ConfigError

STREAMS = ("linguistic", "hin", "pun", "synthetic_gpt3")


def read_forms(release: Path) -> dict[str, Any]:
    """Return the release's forms by stream and id."""
    sys.path.insert(0, str(release))
    tables = [
        importlib.import_module("src.templates.templates").templates,
        importlib.import_module("src.templates.templates_gpt3_wordtasks").templates_gpt3_wordtasks,
    ]
    forms: dict[str, Any] = {}
    for table in tables:
        for name, templates in table.items():
            forms[name] = {form["template_id"]: form for form in templates}
    return forms


def main(argv: Sequence[str] | None = None) -> int:
    """Write the four streams into the working folder."""
    parser = argparse.ArgumentParser(description="Write MemPrompt's streams.")
    parser.add_argument("release", type=Path, help="a clone of github.com/madaan/memprompt")
    release = parser.parse_args(argv).release
    if not (release / "tasks").is_dir():
        raise ConfigError(f"{release} is not a clone of github.com/madaan/memprompt")
    forms = read_forms(release)
    for stream in STREAMS:
        with Path(f"{stream}_300.jsonl").open("w") as file:
            for line in (release / "tasks" / stream / "tasks_300.jsonl").open():
                task = json.loads(line)
                form = forms[stream][task["template_id"]]
                word, answer = task["meta"].values()
                row = {
                    "type": task["type"],
                    "question": form["question"](word),
                    "feedback": form["clarification"],
                    "expected_answer": form["answer"](word, answer),
                }
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
