"""A person's conversation with a memory: by itself, in a terminal, in a pipe, on the page."""

import io
import re
import sys
from html import escape, unescape

import pytest
from following_lm import AKIN, MEANT, FollowingLM, open_memory, open_page, prompted
from starlette.testclient import TestClient

from pgra.cli import main
from pgra.commands.serve import build_app
from pgra.errors import visible
from pgra.lm.base import Completion
from pgra.memory import stream
from pgra.memory.chat import Conversation, page, show_entry, talk
from pgra.memory.log import MemoryEntry
from pgra.memory.memory import Memory

FAR = "make something with < fast > ?"


@pytest.fixture
def memory():
    with open_memory() as memory:
        yield memory


def test_a_question_is_answered_corrected_and_asked_again(memory):
    said = []
    lines = [AKIN, f"/add {MEANT}", FAR, "/delete 1", "/list", "/quit", "/x"]
    talk(Conversation(prompted(), memory), lines, said.append, is_watched=True)
    understood = re.findall(r"the (\w+) for", "\n".join(said))
    assert understood == ["homonym", "synonym", "homonym"]
    assert list(memory) == []


def test_what_is_not_seen_is_told_by_its_number_and_the_rest_stays():
    assert visible("a\u202eb\x1b[2J\U000e0041") == "a\\u202eb\\x1b[2J\\U000e0041"
    plain = "क्\u200dष <b> \n\t 😀 é \\u202e"
    assert visible(plain) == plain
    assert show_entry(MemoryEntry(question='a"\n\u2066', feedback="b")) == '"a\\"\\n\\u2066" -> "b"'


def test_a_pipe_is_a_script_that_ends_at_its_first_mistake(tmp_path, monkeypatch, capsys):
    typed = f"{AKIN}\n/add {MEANT}\n".encode() + b"caf\xe9\n/list\n"
    monkeypatch.setattr(stream, "open_lm", lambda *args: FollowingLM())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    assert main(["memory", "chat", "--lm", "following", "--memory", str(tmp_path / "m")]) == 2
    told, error = capsys.readouterr()
    assert "UTF-8" in error
    assert told.endswith("> caf\\udce9\n")


# The page.

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


def test_on_the_page_feedback_is_added_updated_and_deleted(memory):
    visitor = Visitor(open_page(memory))
    visitor.send("ask", question=AKIN)
    assert f"Question: {AKIN} Understood: the homonym for pretty is … Answer: x" in visitor.shown()
    visitor.send("add", question=AKIN, feedback=f"{MEANT}\r\nplease")
    assert [entry.feedback for entry in memory] == [f"{MEANT}\nplease"]
    assert f"Used: entry 1 {AKIN} {MEANT}" in visitor.shown()
    assert f'value="{escape(AKIN)}"' in visitor.answer.text  # the question stays in its field
    for number in ("99", "-1", "9" * 30, "x"):  # no such entry
        for name in ("update", "delete"):
            assert visitor.send(name, entry=number, feedback="x").status_code == 422
    visitor.send("update", entry="1", feedback="I want an <antonym>")
    assert memory.get(2).feedback == "I want an <antonym>"
    visitor.send("delete", entry="2")
    assert len(memory) == 0
    assert visitor.send("add", question=AKIN, feedback="y" * 2001).status_code == 422
    assert "y" * 2001 in visitor.answer.text  # what was typed stays


def test_without_an_lm_the_page_shows_what_one_would_read():
    with Memory(":memory:") as memory:
        visitor = Visitor(build_app({}, ["127.0.0.1"], page=page(Conversation(None, memory))))
        visitor.send("add", question="When do you close?", feedback="at six")
        visitor.send("ask", question="when do you  close")
        assert "Used: entry 1" in visitor.shown()
        assert "clarification: at six when do you close" in visitor.shown()


def test_what_people_and_the_lm_wrote_is_text_and_never_markup(memory):
    lm = FollowingLM()
    lm._go_on = lambda prompt: Completion(f"the synonym for {HOSTILE} is {HOSTILE} END", 1, 1)
    visitor = Visitor(open_page(memory, completer=lm))
    plain = visitor.answer.text
    visitor.send("add", question=HOSTILE, feedback=f"{HOSTILE} END \u202e")
    asked = visitor.shown()
    visitor.send("add", question=HOSTILE, feedback=" ")  # the error's page
    assert "default-src 'none'" in visitor.answer.headers["content-security-policy"]
    assert not re.search(r"https?:|url\(", plain)
    assert visitor.answer.text.count("<script") == plain.count("<script") == 0
    assert asked.count(HOSTILE) >= 8
    assert "\\u202e" in visitor.shown()
    assert "\u202e" not in visitor.answer.text


def test_another_page_may_not_send_forms_here(memory):
    visitor = Visitor(open_page(memory))

    def code(**headers):
        fields = {"do": "ask", "question": AKIN}
        return visitor.client.post("/", data=fields, headers=headers).status_code

    assert code(origin="http://127.0.0.1") == 200
    for other in ("http://evil.example", "null", "http://["):
        assert code(origin=other) == 403
