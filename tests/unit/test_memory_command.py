"""`pgra memory`, as a user calls it."""

import pytest

from pgra.cli import main


@pytest.fixture
def memory(tmp_path, monkeypatch, capsys):
    """Call the command in an empty folder; give its code, and what it said on both streams."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(["memory", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def error(called):
    code, out, err = called
    assert (code, out) == (2, "")
    assert err.count("\n") == 2
    return err.strip().removeprefix("pgra: error: ")


def test_a_question_of_any_kind_gets_feedback_of_its_like_and_no_other(memory):
    memory("add", "why?", "I want the reason for the last answer")
    memory("add", "How do I reset my password", "of the router")

    def told(question, *flags):
        return memory("search", question, "--k", 1, *flags)[1].split()[1]

    like = ("Why", "how do I  reset my pasword?", "Please, how do I reset my password?")
    other = ("hello", "x < 3 and y > 2", "<i>what is the capital of France</i>")
    assert [told(question) for question in like] == ["used"] * 3
    assert [told(question) for question in other] == ["too"] * 3
    assert told("hello", "--family", "lexical") == "used"  # the release's


def test_users_are_kept_apart_and_what_is_erased_is_gone(memory, tmp_path):
    memory("add", "how do I log in", "of the mail")
    memory("add", "how do I log in", "of the router", "--user", "anna")
    memory("add", "where is it", "upstairs", "--user", "bert")

    def told(*flags):
        return memory("search", "How do I log in?", *flags)[1]

    assert "of the mail" in told()
    assert "router" not in told() + told("--user", "bert")
    lines = told("--user", "anna").splitlines()
    assert ["router" in line for line in lines] == [True]
    assert "upstairs" not in told("--user", "anna")
    listed = [len(memory("list", *f)[1].splitlines()) for f in ((), ("--user", "anna"))]
    assert listed == [3, 1]
    memory("delete", 2)
    assert "1 events" in memory("export", "bert.jsonl", "--user", "bert")[1]
    memory("import", "bert.jsonl", "--memory", "new.sqlite", "--user", "clara")
    assert "clara" in memory("list", "--memory", "new.sqlite")[1]
    assert "2 events erased, 0 entries left" in memory("erase", "--user", "anna")[1]
    assert "1 events erased, 1 entries left" in memory("erase", 1)[1]
    assert memory("list", "--log")[1].count("  erase\n") == 2
    bytes_left = b"".join(path.read_bytes() for path in tmp_path.glob("memory.sqlite*"))
    assert b"upstairs" in bytes_left
    assert not any(text in bytes_left for text in (b"of the mail", b"of the router", b"log in"))
