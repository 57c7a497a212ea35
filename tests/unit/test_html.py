"""The report's page: what hostile texts become, what it asks for, what stands on it."""

import re

import pytest
from planted_runs import plant

from pgra.commands.report import main

pytestmark = pytest.mark.slow

HOSTILE = '</pre><script>alert(1)</script><img src=x onerror="alert(1)">{{ title }}'


def test_hostile_text_stays_text_and_nothing_is_asked_for_outside(tmp_path):
    hostile = {"text": HOSTILE, "evidence": [[HOSTILE]] * 4, "notes": [HOSTILE]}
    plant(tmp_path / "pgra", n=4, wrong=[1], **hostile)
    plant(tmp_path / "fid", method="fid", n=4, text=HOSTILE)
    path = tmp_path / "page.html"
    assert main([str(tmp_path), "--output", str(path)]) == 0
    page = path.read_text(encoding="utf-8")
    assert page.count("&lt;script&gt;alert(1)") > 8
    assert not re.search(r"<(script|link|iframe|object|form|a)\b", page)
    (image,) = re.findall(r"<img[^>]*", page)
    assert re.fullmatch(r'<img alt="[\w ]+" src="data:image/svg\+xml;base64,[\w+/=]+"', image)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    # The tables, their notes, and the examples that differ first: pgra is wrong on the second.
    order = [page.index(words) for words in ("<h1>", "<table", "bold, or *", "Examples", "test-1:")]
    assert order == sorted(order)
    assert re.findall(r"test-(\d):", page) == ["1", "0", "2", "3"]
