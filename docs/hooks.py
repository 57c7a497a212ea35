"""Pages of the site that are made from the code: commands, task YAML, Python."""

import io
import re
from contextlib import redirect_stdout
from typing import Any

from mkdocs.structure.files import File, Files

import pgra
from pgra.cli import COMMANDS, main

FRONT_DOOR = (
    *("Reranker", "Index", "Hit", "train", "Reader", "ExemplarSelector", "Memory"),
    *("Encoder", "CausalLM", "Task"),
)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, before links are checked."""
    pages = {"commands": commands_page(), "python": python_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name a file that is not of the site, where code hosts have a link to it."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)


def shown(*words: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(words)
    if code:
        raise RuntimeError(f"pgra {' '.join(words)} ended with {code}")
    return out.getvalue()


def commands_page() -> str:
    """Return every command's help, with all flags."""
    parts = ["# Commands\n\nEvery command with all its flags, as `--help-all` shows them."]
    for name in COMMANDS:
        parts.append(f"## pgra {name}\n\n```text\n{shown(name, '--help-all')}```")
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Return every public name, those that a program starts from first."""
    names = [*FRONT_DOOR, *(name for name in pgra.__all__ if name not in FRONT_DOOR)]
    homes = [f"::: {pgra._HOME_OF[name]}.{name}" for name in names]  # imports no torch
    return "# Python\n\n" + "\n\n".join(homes) + "\n"
