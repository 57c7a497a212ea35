"""`pgra memory web`: the page over HTTP."""

import re
from html import unescape

import pytest
from following_lm import AKIN, MEANT, FollowingLM, open_memory, open_page
from starlette.testclient import TestClient

from pgra.lm.base import Completion

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
def memory():
    return open_memory()


@pytest.fixture
def page(memory):
    with open_page(memory) as app:
        yield app


def test_a_question_is_asked_feedback_is_added_and_its_entry_deleted(page, memory):
    visitor = Visitor(page)
    visitor.send("ask", question=AKIN)
    assert f"Question: {AKIN} Understood: the homonym for pretty is … Answer: x" in visitor.shown()
    assert "Nothing was found in the memory." in visitor.shown()
    visitor.send("add", question=AKIN, feedback=f"{MEANT}\r\nplease")
    assert [entry.feedback for entry in memory] == [f"{MEANT}\nplease"]
    assert "Noted as entry 1, and asked again." in visitor.shown()
    assert "Understood: the synonym for pretty is …" in visitor.shown()
    assert f"Used: entry 1, score 0.0000, gate -5 {AKIN} {MEANT}" in visitor.shown()
    visitor.send("ask", question="make something with < fast > ?")
    assert "Not used: too far: entry 1, score -14.0000" in visitor.shown()
    for number in ("99", "-1", "9" * 30, "x"):  # no such entry
        for name in ("update", "delete"):
            assert visitor.send(name, entry=number, feedback="x").status_code == 422
    visitor.send("update", entry="1", feedback="I want an <antonym>")
    assert memory.get(2).feedback == "I want an <antonym>"
    visitor.send("delete", entry="2")
    assert len(memory) == 0


def test_what_people_and_the_lm_wrote_is_text_and_never_markup(memory):
    lm = FollowingLM()
    lm._go_on = lambda prompt: Completion(f"the synonym for {HOSTILE} is {HOSTILE} END", 1, 1)
    with open_page(memory, completer=lm) as page:
        visitor = Visitor(page)
        plain = visitor.answer.text
        visitor.send("ask", question=HOSTILE)
        visitor.send("add", question=HOSTILE, feedback=f"{HOSTILE} END \u202e")
        asked = visitor.shown()
        visitor.send("add", question=HOSTILE, feedback=" ")  # the error's page
    assert "default-src 'none'" in visitor.answer.headers["content-security-policy"]
    assert not re.search(r"https?:|url\(", plain)
    assert "LM &lt;following&gt;" in plain
    assert visitor.answer.text.count("<script") == plain.count("<script") == 0
    assert asked.count(HOSTILE) >= 8
    assert "\\u202e" in visitor.shown()
    assert "\u202e" not in visitor.answer.text


def test_a_mistake_is_shown_on_the_page_and_what_was_typed_stays(page, memory):
    visitor = Visitor(page)
    answer = visitor.send("add", question=AKIN, feedback="y" * 2001)
    assert answer.status_code == 422
    assert "the feedback has 2,001 char" in visitor.shown()
    assert '<p role="alert">' in answer.text
    assert "y" * 2001 in answer.text
    assert AKIN in unescape(answer.text)
    assert len(memory) == 0


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
