"""The documentation builds as a site, without a network, and without a warning."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(root, site):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    words += ["--site-dir", str(site)]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_builds_and_a_wrong_link_would_not(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {str(page.relative_to(tmp_path / "site").parent) for page in tmp_path.rglob("*.html")}
    assert {"icl", "memory", "reference/python", "reference/commands"} <= pages
    commands = (tmp_path / "site/reference/commands/index.html").read_text()
    assert "--num_candidates" in commands
    python = (tmp_path / "site/reference/python/index.html").read_text()
    assert "pgra.api.reranking.Reranker.rank" in python
    assert "fonts.googleapis" not in python

    wrong = tmp_path / "wrong"  # the control
    (wrong / "docs").mkdir(parents=True)
    (wrong / "docs/index.md").write_text("[gone](gone.md)\n")
    settings = "site_name: x\nvalidation: {links: {not_found: warn}}\n"
    (wrong / "mkdocs.yml").write_text(settings)
    assert build(wrong, tmp_path / "other").returncode != 0
