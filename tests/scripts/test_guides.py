"""The Python of the documentation runs, page by page, in an empty folder and in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/**/*.md"))


def python_of(page):
    """Return the Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p)], ids=lambda p: p.stem)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    namespace = {"__name__": "__main__"}
    for block in python_of(page):
        exec(compile(block, str(page), "exec"), namespace)
