"""The report's page: what hostile texts become, what it asks for, what stands on it."""

import re
from html.parser import HTMLParser

import pytest
from planted_runs import plant

from pgra.commands.report import main

HOSTILE = '</pre><script>alert(1)</script><img src=x onerror="alert(1)">{{ title }}'


class Elements(HTMLParser):
    """The elements that a browser makes of a page."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    plant(root / "pgra", n=4, wrong=[1], text=HOSTILE, evidence=[[HOSTILE]] * 4, notes=[HOSTILE])
    plant(root / "fid", method="fid", n=4, text=HOSTILE)
    path = root / "page.html"
    assert main([str(root), "--output", str(path)]) == 0
    return path.read_text(encoding="utf-8")


def test_hostile_text_stays_text_and_nothing_is_asked_for_outside(page):
    found = Elements(page).found
    assert page.count("&lt;script&gt;alert(1)") > 8
    tags = {tag for tag, _ in found}
    assert not tags & {"script", "link", "iframe", "object", "form", "a"}
    for tag, attributes in found:
        assert not any(name.startswith("on") for name in attributes), tag
        assert tag == "img" or not {"src", "srcset", "action", "href", "style"} & set(attributes)
    (image,) = (attributes for tag, attributes in found if tag == "img")
    assert image["src"].startswith("data:image/svg+xml;base64,")
    (policy,) = (a["content"] for tag, a in found if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_the_tables_their_notes_and_the_examples_that_differ_first(page):
    order = [page.index(words) for words in ("<h1>", "<table", "bold, or *", "Examples", "test-1:")]
    assert order == sorted(order)
    shown = re.findall(r"test-(\d):", page)
    assert shown == ["1", "0", "2", "3"]  # pgra is wrong on the second alone
