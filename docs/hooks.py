"""Pages of the site that are made from the code: commands, task YAML, Python."""

import io
import re
from contextlib import redirect_stdout
from typing import Any

from mkdocs.structure.files import File, Files

import pgra
import pgra.extend
from pgra.cli import COMMANDS, main

FRONT_DOOR = (
    "Reranker",
    "Index",
    "Hit",
    "train",
    "Reader",
    "ExemplarSelector",
    "Memory",
    "Encoder",
    "CausalLM",
    "Task",
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


def command_output(*words: str) -> str:
    """Return what a command prints."""
    output = io.StringIO()
    with redirect_stdout(output):
        code = main(words)
    if code:
        raise RuntimeError(f"pgra {' '.join(words)} ended with {code}")
    return output.getvalue()


def commands_page() -> str:
    """Return every command's help, with all flags."""
    parts = ["# Commands\n\nEvery command with all its flags, as `--help-all` shows them."]
    for name in COMMANDS:
        parts.append(f"## pgra {name}\n\n```text\n{command_output(name, '--help-all')}```")
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Return every public name, those that a program starts from first."""
    names = [*FRONT_DOOR, *(name for name in pgra.__all__ if name not in FRONT_DOOR)]
    others = [name for name in pgra.extend.__all__ if name not in pgra.__all__]
    parts = ["# Python"]
    parts += [f"::: {pgra._HOME_OF[name]}.{name}" for name in names]  # imports no torch
    parts.append("# For classes of your own\n\nThese are in `pgra.extend`: [extend](../extend.md).")
    parts += [f"::: {pgra.extend._HOME_OF[name]}.{name}" for name in others]
    return "\n\n".join(parts) + "\n"
