"""`pgra memory web`: the page over HTTP."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

import following_lm
import pytest
from following_lm import AKIN, MEANT, FollowingLM, entries, open_page
from starlette.testclient import TestClient

from pgra.cli import main
from pgra.errors import ArtifactError
from pgra.lm.base import Completion
from pgra.memory.log import FeedbackLog, Part

ROOT = Path(__file__).parents[2]
HOSTILE = '<script>alert("1")</script>&lt;{{ 7 * 7 }}'


class Visitor:
    """A tab that reads pages and sends their forms."""

    def __init__(self, app):
        self.client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=True)
        self.answer = self.client.get("/")
        self.address = str(self.answer.url)

    def send(self, name, **fields):
        self.answer = self.client.post(f"{self.address}/{name}", data=fields)
        return self.answer

    def shown(self):
        text = re.sub(r"<[^>]*>", " ", self.answer.text)
        return " ".join(unescape(text).split())


@pytest.fixture
def page(tmp_path):
    with open_page(tmp_path / "memory.sqlite") as app:
        yield app


def test_a_question_is_asked_corrected_and_its_entry_forgotten(page):
    visitor = Visitor(page)
    visitor.send("ask", question=AKIN)
    assert visitor.answer.url.fragment == "answer"
    assert f"Question {AKIN} Understood the homonym for pretty is … Answer x" in visitor.shown()
    assert "nothing was found" in visitor.shown()
    visitor.send("correct", turn="1", feedback=f"{MEANT}\r\nplease")
    assert entries(page) == [(AKIN, f"{MEANT}\nplease")]
    assert "Noted as entry 1, and asked again." in visitor.shown()
    assert "Understood the synonym for pretty is …" in visitor.shown()
    told = f"Used entry 1, score 0.0000 (passes the gate of -5) Question {AKIN} Feedback {MEANT}"
    assert told in visitor.shown()
    visitor.send("ask", question="make something with < fast > ?")
    assert "Not used: too far entry 1, score -14.0000 (does not pass the gate" in visitor.shown()
    assert visitor.answer.text.count('<details class="earlier">') == 2
    visitor.send("forget", entry="1")
    assert (entries(page), visitor.answer.url.fragment) == ([], "memory")


def test_an_entry_is_corrected_found_and_a_forget_undone_on_the_page(page):
    visitor = Visitor(page)
    for question in (AKIN, "expand on < fast > ?"):
        visitor.send("ask", question=question)
        turn = re.search(r'name="turn" value="(\d+)"', visitor.answer.text).group(1)
        visitor.send("correct", turn=turn, feedback=MEANT)
    visitor.send("change", entry="1", feedback="I want an <antonym>", search="PRETTY")
    assert (AKIN, "I want an <antonym>") in entries(page)
    assert (visitor.answer.url.query, visitor.answer.url.fragment) == (b"search=PRETTY", "memory")
    assert "In the memory: 1 entry found" in visitor.shown()  # the search goes on
    assert "entry 2" not in visitor.shown().partition("In the memory")[2].casefold()
    visitor.send("forget", entry="2")
    assert [question for question, _ in entries(page)] == [AKIN]
    assert "Entry 2 is forgotten." in visitor.shown()
    visitor.send("restore", entry="2")
    assert entries(page)[-1] == ("expand on < fast > ?", MEANT)
    assert "is forgotten" not in visitor.shown()
    answer = visitor.send("change", entry="5", feedback=" ")
    assert (answer.status_code, entries(page)[-1][1]) == (422, MEANT)
    assert "the feedback is empty" in visitor.shown()
    assert str(visitor.client.get(str(answer.url)).url) == visitor.address
    for number in ("99", "-1", "9" * 30, "x"):  # no such entry
        for name in ("change", "forget", "restore"):
            assert visitor.send(name, entry=number, feedback="x").status_code == 422
    assert len(entries(page)) == 2
    visitor.answer = visitor.client.get(f"{visitor.address}?search=%3Cb%3E&forgotten=x")
    assert "Nothing has this text." in visitor.shown()
    assert "<b>" not in visitor.answer.text


def test_a_scope_shows_and_changes_its_own_entries_alone(tmp_path):
    path = tmp_path / "memory.sqlite"
    with FeedbackLog.open(path) as log:
        log.write(AKIN, MEANT)
        log.write("expand on < a > ?", "of bert", scope="bert")
    with open_page(path, part=Part(scope="anna")) as page:
        visitor = Visitor(page)
        visitor.send("ask", question="what is akin to < fast > ?")
        assert "Used entry 1" in visitor.shown()  # what all share
        for name in ("forget", "change", "restore"):
            visitor.send(name, entry="2", feedback="x")
            assert "entry 2 is of another task or scope" in visitor.shown()
        visitor.send("correct", turn="1", feedback="of anna")
        assert "In the memory: 1 entry" in visitor.shown()
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
        visitor.send("correct", turn="1", feedback=f"{HOSTILE} END \u202e")
        visitor.send("correct", turn="2", feedback=" ")  # the error's page, with what was typed
    assert "LM &lt;following&gt;" in plain
    assert visitor.answer.text.count("<script") == plain.count("<script") == 1
    assert visitor.shown().count(HOSTILE) >= 8
    assert "\\u202e" in visitor.shown()
    assert "\u202e" not in visitor.answer.text


def test_two_tabs_have_a_conversation_each_and_one_memory(page):
    one, other = Visitor(page), Visitor(page)
    one.send("ask", question=AKIN)
    other.send("ask", question="expand on < fast > ?")
    assert "pretty" not in other.shown()
    one.send("correct", turn="1", feedback=MEANT)
    other.send("ask", question="what is akin to < fast > ?")
    assert "the synonym for fast is" in other.shown()
    questions = [f"which word {'is' * n} < a{n} > ?" for n in range(1, 9)]

    def teach(question):
        visitor = Visitor(page)
        visitor.send("ask", question=question)
        return visitor.send("correct", turn="1", feedback="I want a synonym").status_code

    with ThreadPoolExecutor(4) as pool:  # several at once
        assert list(pool.map(teach, questions)) == [200] * 8
    assert sorted(entries(page)[1:]) == [(q, "I want a synonym") for q in sorted(questions)]


@pytest.mark.parametrize(
    ("form", "fields", "message", "kept"),
    [
        ("correct", {"turn": "1", "feedback": "y" * 2001}, "the feedback has 2,001 char", "y" * 99),
        ("correct", {"turn": "9", "feedback": "z"}, "that question is no longer on the page", "z"),
    ],
)
def test_a_mistake_is_told_on_the_page_and_what_was_typed_stays(page, form, fields, message, kept):
    visitor = Visitor(page)
    visitor.send("ask", question=AKIN)
    answer = visitor.send(form, **fields)
    assert (answer.status_code, str(answer.url)) == (422, f"{visitor.address}/{form}")
    assert str(visitor.client.get(str(answer.url)).url) == visitor.address  # loaded again
    assert message in visitor.shown()
    assert '<p class="error" role="alert"' in answer.text
    assert kept in answer.text
    assert entries(page) == []


def test_another_page_or_name_may_not_send_forms_here(page):
    visitor = Visitor(page)
    address = f"{visitor.address}/ask"

    def code(**headers):
        return visitor.client.post(address, data={"question": AKIN}, headers=headers).status_code

    assert code(origin="http://127.0.0.1") == 200
    for other in ("http://evil.example", "null", "http://["):
        assert code(origin=other) == 403
    assert code(host="evil.example") == 400  # a name that was made to point here
    refused = visitor.client.get("/", headers={"host": "evil.example"}).text
    assert "open http://127.0.0.1:80/ there. To open it to others, start pgra" in refused
    assert visitor.client.get("/", headers={"host": "127.0.0.1:7860"}).status_code == 200
    far = visitor.client.post("/chat/guessed/ask", data={"question": AKIN})
    assert str(far.url) not in (address, visitor.address)  # a new tab
    assert AKIN not in far.text
    bodies = (b"question=" + b"x" * 300_000, b"&a=1" * 9, b"question=%FF")
    codes = [visitor.client.post(address, content=body).status_code for body in bodies]
    assert codes == [413, 400, 400]


def test_a_page_asks_for_nothing_of_another_host(page):
    visitor = Visitor(page)
    answer = visitor.send("ask", question=AKIN)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    fields = re.findall(r'<(?:input|textarea) id="(\w+)"', answer.text)
    assert (
        re.findall(r'<label for="(\w+)"', answer.text)
        == fields
        == ["question", "feedback", "search"]
    )
    own = re.findall(r'(?:src|href|action)="([^"]*)"', answer.text)
    assert len(own) >= 5
    assert all(re.match(r"/\w|#|data:,$", place) for place in own), own
    for name in ("memory.css", "memory.js"):
        asset = visitor.client.get(f"/{name}")
        assert asset.status_code == 200
        assert not re.search(r"http|url\(", asset.text)


def test_a_page_that_cannot_open_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory.sqlite").write_text("no memory " * 100)
    before = threading.active_count()
    with pytest.raises(ArtifactError, match="is damaged"), open_page(tmp_path / "memory.sqlite"):
        pass
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", 0)) as taken:  # told before anything is loaded
        port = taken.getsockname()[1]
        assert main(["memory", "web", "--lm", "x", "--port", str(port)]) == 2
        assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 0), ("SIGKILL", -signal.SIGKILL)])
def test_what_was_noted_stands_however_the_server_ends(sent, code, tmp_path):
    path = tmp_path / "memory.sqlite"
    words = ["memory", "web", "--port", "0", "--lm", "following", "--memory", str(path)]
    process = subprocess.Popen(
        [sys.executable, following_lm.__file__, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == f"{path}: LM following; look-up edit, gate -5\n"
    address = re.search(r"http://127.0.0.1:\d+/", process.stdout.readline()).group()
    with urllib.request.urlopen(address) as page:
        tab = page.url
    for name, fields in (("ask", {"question": AKIN}), ("correct", {"turn": 1, "feedback": MEANT})):
        body = urllib.parse.urlencode(fields).encode()
        urllib.request.urlopen(f"{tab}/{name}", body).close()
    process.send_signal(signal.Signals[sent])
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == code
    with FeedbackLog.open(path, is_writable=False) as log:
        log.verify()
        assert [entry.feedback for entry in log.entries()] == [MEANT]
