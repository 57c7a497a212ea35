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


def test_users_are_kept_apart_and_what_is_erased_is_gone(memory, tmp_path):
    memory("add", "how do I log in", "of the mail")
    memory("add", "how do I log in", "of the router", "--user", "anna")
    memory("add", "where is it", "upstairs", "--user", "bert")
    for user, meant in (("", "mail"), ("anna", "router"), ("bert", "mail")):
        (line,) = memory("search", "How do I log in?", "--user", user)[1].splitlines()[:1]
        assert line.split()[1:4] == ["used", "entry", "2" if user == "anna" else "1"]
        assert meant in line
    listed = [len(memory("list", *f)[1].splitlines()) for f in ((), ("--user", "anna"))]
    assert listed == [3, 1]
    assert memory("delete", 1, "--user", "anna")[0] == 2
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
