"""`pgra memory web`: the page over HTTP."""

import re
from html import unescape

import pytest
from following_lm import AKIN, MEANT, FollowingLM, entries, open_page
from starlette.testclient import TestClient

from pgra.lm.base import Completion
from pgra.memory.log import FeedbackLog, Part

HOSTILE = '<script>alert("1")</script>&lt;{{ 7 * 7 }}'


class Visitor:
    """Who reads pages and sends their forms."""

    def __init__(self, app):
        self.client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=True)
        self.answer = self.client.get("/")

    def send(self, name, **fields):
        self.answer = self.client.post("/", data={"do": name, **fields})
        return self.answer

    def shown(self):
        text = re.sub(r"<style>.*</style>|<[^>]*>", " ", self.answer.text, flags=re.DOTALL)
        return " ".join(unescape(text).split())


@pytest.fixture
def page(tmp_path):
    with open_page(tmp_path / "memory.sqlite") as app:
        yield app


def test_a_question_is_asked_corrected_and_its_entry_forgotten(page):
    visitor = Visitor(page)
    visitor.send("ask", question=AKIN)
    assert f"Question: {AKIN} Understood: the homonym for pretty is … Answer: x" in visitor.shown()
    assert "Nothing was found in the memory." in visitor.shown()
    visitor.send("correct", question=AKIN, feedback=f"{MEANT}\r\nplease")
    assert entries(page) == [(AKIN, f"{MEANT}\nplease")]
    assert "Noted as entry 1, and asked again." in visitor.shown()
    assert "Understood: the synonym for pretty is …" in visitor.shown()
    assert f"Used: entry 1, score 0.0000, gate -5 {AKIN} {MEANT}" in visitor.shown()
    visitor.send("ask", question="make something with < fast > ?")
    assert "Not used: too far: entry 1, score -14.0000" in visitor.shown()
    for number in ("99", "-1", "9" * 30, "x"):  # no such entry
        for name in ("change", "forget"):
            assert visitor.send(name, entry=number, feedback="x").status_code == 422
    visitor.send("change", entry="1", feedback="I want an <antonym>")
    assert entries(page) == [(AKIN, "I want an <antonym>")]
    visitor.send("forget", entry="2")
    assert entries(page) == []


def test_a_scope_shows_and_changes_its_own_entries_alone(tmp_path):
    path = tmp_path / "memory.sqlite"
    with FeedbackLog.open(path) as log:
        log.write(AKIN, MEANT)
        log.write("expand on < a > ?", "of bert", scope="bert")
    with open_page(path, part=Part(scope="anna")) as page:
        visitor = Visitor(page)
        visitor.send("ask", question="what is akin to < fast > ?")
        assert "Used: entry 1" in visitor.shown()  # what all share
        for name in ("forget", "change"):
            visitor.send(name, entry="2", feedback="x")
            assert "entry 2 is of another task or scope" in visitor.shown()
        visitor.send("correct", question="what is akin to < fast > ?", feedback="of anna")
        assert "In the memory: 1" in visitor.shown()
    with FeedbackLog.open(path) as log:
        assert [(e.scope, e.feedback) for e in log.entries()][1:] == [
            ("bert", "of bert"),
            ("anna", "of anna"),
        ]


def test_what_people_and_the_lm_wrote_is_text_and_never_markup(tmp_path):
    lm = FollowingLM()
    lm._go_on = lambda prompt: Completion(f"the synonym for {HOSTILE} is {HOSTILE} END", 1, 1)
    with open_page(tmp_path / "memory.sqlite", completer=lm) as page:
        visitor = Visitor(page)
        plain = visitor.answer.text
        visitor.send("ask", question=HOSTILE)
        visitor.send("correct", question=HOSTILE, feedback=f"{HOSTILE} END \u202e")
        asked = visitor.shown()
        visitor.send("correct", question=HOSTILE, feedback=" ")  # the error's page
    assert "default-src 'none'" in visitor.answer.headers["content-security-policy"]
    assert not re.search(r"https?:|url\(", plain)
    assert "LM &lt;following&gt;" in plain
    assert visitor.answer.text.count("<script") == plain.count("<script") == 0
    assert asked.count(HOSTILE) >= 8
    assert "\\u202e" in visitor.shown()
    assert "\u202e" not in visitor.answer.text


def test_a_mistake_is_shown_on_the_page_and_what_was_typed_stays(page):
    visitor = Visitor(page)
    answer = visitor.send("correct", question=AKIN, feedback="y" * 2001)
    assert answer.status_code == 422
    assert "the feedback has 2,001 char" in visitor.shown()
    assert '<p role="alert">' in answer.text
    assert "y" * 2001 in answer.text
    assert AKIN in unescape(answer.text)
    assert entries(page) == []


def test_another_page_or_name_may_not_send_forms_here(page):
    visitor = Visitor(page)

    def code(**headers):
        fields = {"do": "ask", "question": AKIN}
        return visitor.client.post("/", data=fields, headers=headers).status_code

    assert code(origin="http://127.0.0.1") == 200
    for other in ("http://evil.example", "null", "http://["):
        assert code(origin=other) == 403
    assert code(host="evil.example") == 400  # a name that was made to point here
    assert visitor.client.get("/", headers={"host": "127.0.0.1:7860"}).status_code == 200
    bodies = (b"question=" + b"x" * 300_000, b"&a=1" * 9, b"question=%FF")
    codes = [visitor.client.post("/", content=body).status_code for body in bodies]
    assert codes == [413, 400, 400]
