"""Answers outlive their process, are shared by several, and are never half written."""

import math
import os
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from pgra.errors import ArtifactError
from pgra.lm import cache as answers_cache
from pgra.lm.cache import FILE, Answer, AnswersCache, answer_key

PARIS = Answer(" Paris", 12, 2)


def test_what_was_kept_is_found_again_and_nothing_else(tmp_path):
    cache = AnswersCache(tmp_path / "answers")
    cache.keep("a", PARIS, model="m")
    scored = {"b": Answer("", 9, 1, -0.25), "c": Answer("", log_probability=-math.inf)}
    cache.keep_all(scored, model="m")
    again = AnswersCache(tmp_path / "answers")
    assert again.find(["b", "none", "c", "a"]) == {"a": PARIS, **scored}
    assert len(again) == 3


def test_looking_leaves_nothing_behind(tmp_path):
    cache = AnswersCache(tmp_path / "answers")
    assert cache.find(["a"]) == {}
    assert len(cache) == 0
    assert not (tmp_path / "answers").exists()


def test_the_first_answer_of_a_key_stands(tmp_path):
    cache = AnswersCache(tmp_path)
    cache.keep("a", PARIS, model="m")
    cache.keep("a", Answer(" Rome"), model="m")
    assert cache.find(["a"]) == {"a": PARIS}


def test_more_keys_than_one_look_up_takes_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("pgra.lm.cache._AT_ONCE", 3)
    cache = AnswersCache(tmp_path)
    keys = [f"k{i}" for i in range(8)]
    for key in keys[::2]:
        cache.keep(key, PARIS, model="m")
    assert sorted(cache.find(keys)) == keys[::2]


def test_a_key_depends_on_the_endpoint_and_on_all_that_is_sent():
    body = {"model": "m", "prompt": "p", "max_tokens": 4}
    key = answer_key("http://here/v1", body)
    assert key == answer_key("http://here/v1", dict(reversed(body.items())))
    others = [{**body, name: "other"} for name in body] + [{**body, "stop": ["\n"]}]
    assert len({key, answer_key("http://there/v1", body), *map_keys(others)}) == 6


def map_keys(bodies):
    return [answer_key("http://here/v1", body) for body in bodies]


def test_threads_share_the_file(tmp_path):
    cache = AnswersCache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: cache.keep(f"k{i % 20}", PARIS, model="m"), range(40)))
    assert len(cache) == 20


WRITER = """
    import sys
    from pathlib import Path
    from pgra.lm.cache import Answer, AnswersCache
    cache, name = AnswersCache(Path(sys.argv[1])), sys.argv[2]
    for i in range(int(sys.argv[3])):
        cache.keep(f"{name}{i}", Answer(f"{name} {i}"), model="m")
        print(i, flush=True)
"""


def start_writer(folder, name, count):
    words = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), name, str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_two_processes_share_the_file_and_a_killed_one_leaves_whole_answers(tmp_path):
    killed, other = start_writer(tmp_path, "a", 100_000), start_writer(tmp_path, "b", 30)
    with killed, other:
        seen = [int(killed.stdout.readline()) for _ in range(20)]
        killed.kill()
        seen += [int(line) for line in killed.stdout.read().split()]
        other.stdout.read()
    assert (killed.returncode, other.returncode) == (-9, 0)
    cache = AnswersCache(tmp_path)
    kept = cache.find([f"a{i}" for i in seen] + [f"b{i}" for i in range(30)])
    assert kept["b29"] == Answer("b 29")
    assert len(kept) == len(seen) + 30  # all that was told to be kept is there
    assert len(cache) in (len(kept), len(kept) + 1)  # and at most the one that was not yet told


def test_a_file_that_another_makes_while_one_looks_is_no_foreign_one(tmp_path, monkeypatch):
    look, looks = answers_cache._pragma, []

    def look_slowly(db, name):
        found = look(db, name)
        looks.append(name)
        if len(looks) == 1:
            AnswersCache(tmp_path).keep("other", PARIS, model="m")
        return found

    monkeypatch.setattr(answers_cache, "_pragma", look_slowly)
    AnswersCache(tmp_path).keep("own", PARIS, model="m")
    assert AnswersCache(tmp_path).find(["own", "other"]) == {"own": PARIS, "other": PARIS}


def test_a_write_that_was_torn_is_rolled_back(tmp_path):
    """As a power cut leaves it: pages half written, the journal beside them."""
    AnswersCache(tmp_path).keep("a", PARIS, model="m")
    torn = """
        import os, sqlite3, sys
        db = sqlite3.connect(sys.argv[1])
        db.execute("PRAGMA cache_size = 1")  # spill into the file before the commit
        db.execute("BEGIN IMMEDIATE")
        for i in range(2000):
            db.execute("INSERT INTO answers VALUES (?, 'm', ?)", (f"torn{i}", "x" * 200))
        os._exit(9)
    """
    before = (tmp_path / FILE).stat().st_size
    words = [sys.executable, "-c", textwrap.dedent(torn), str(tmp_path / FILE)]
    assert subprocess.run(words, check=False).returncode == 9
    assert (tmp_path / f"{FILE}-journal").exists()
    assert (tmp_path / FILE).stat().st_size > before  # the control: something was torn
    cache = AnswersCache(tmp_path)
    assert cache.find(["a", "torn0", "torn1999"]) == {"a": PARIS}
    assert len(cache) == 1


def test_damaged_and_foreign_files_are_refused_with_the_way_out(tmp_path):
    path = tmp_path / FILE
    path.write_bytes(b"this is no database, and longer than its header " * 40)
    with pytest.raises(ArtifactError, match=r"answers\.sqlite is damaged .*: move it away"):
        AnswersCache(tmp_path).find(["a"])
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (x)")
    db.close()
    with pytest.raises(ArtifactError, match="is no file of answers of pgra: move it away"):
        AnswersCache(tmp_path).keep("a", PARIS, model="m")
    path.unlink()
    AnswersCache(tmp_path).keep("a", PARIS, model="m")
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(ArtifactError, match="has format 7, this pgra reads 1: update pgra"):
        AnswersCache(tmp_path).find(["a"])


def test_a_row_that_is_no_answer_is_refused(tmp_path):
    AnswersCache(tmp_path).keep("a", PARIS, model="m")
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE answers SET answer = '{\"other\": 1}'")
    db.close()
    with pytest.raises(ArtifactError, match="is damaged .*its answers are asked again"):
        AnswersCache(tmp_path).find(["a"])


def test_a_file_that_another_job_holds_is_waited_for_and_then_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pgra.lm.cache._PATIENCE", 0.05)
    cache = AnswersCache(tmp_path)
    cache.keep("a", PARIS, model="m")
    holder = sqlite3.connect(tmp_path / FILE)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(ArtifactError, match=r"cannot be used \(database is locked\)"):
            cache.keep("b", PARIS, model="m")
    finally:
        holder.rollback()
        holder.close()
    cache.keep("b", PARIS, model="m")
    assert len(cache) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ArtifactError, match="cannot be used"):
        AnswersCache(tmp_path).keep("a", PARIS, model="m")
