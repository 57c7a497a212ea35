"""The documentation builds as a site, without a network, and without a warning."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    words.append(str(tmp_path / "site"))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    python = (tmp_path / "site/reference/python/index.html").read_text()
    assert "pgra.rerank.reranker.Reranker.rank" in python
    assert "fonts.googleapis" not in python
