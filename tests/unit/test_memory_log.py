"""The memory's log: nothing acknowledged is lost, and what is damaged is told."""

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.errors import ArtifactError, DataError
from pgra.memory.families import plain
from pgra.memory.log import MemoryEntry, read_events, replay
from pgra.memory.memory import Memory


def event(question="what is like", feedback="a synonym"):
    return MemoryEntry(question=question, feedback=feedback, time="2026-01-01")


def told(memory):
    return {plain(entry.question): entry.feedback for entry in memory}


def test_a_change_is_whole_or_not_at_all(memory):
    first, second = memory.add("a", "one"), memory.add("b", "two")
    memory.delete(first.id)
    with pytest.raises(DataError, match="entry 1"):
        memory.delete(second.id, first.id)
    with Memory(memory.path) as other:  # another process's view
        assert told(other) == {"b": "two"}


def test_a_memory_that_was_moved_or_replaced_is_not_written(memory):
    memory.add("a", "one")
    aside = memory.path.with_name("aside.sqlite")
    memory.path.rename(aside)
    with pytest.raises(ArtifactError, match="memory.sqlite"):
        memory.add("b", "two")
    shutil.copy(aside, memory.path)
    with pytest.raises(ArtifactError):
        memory.delete(1)
    aside.replace(memory.path)
    memory.add("b", "two")  # the control
    assert told(memory) == {"a": "one", "b": "two"}


LETTERS = st.characters(exclude_categories=["Cs", "Cc"])
TEXT = st.text(LETTERS, min_size=1, max_size=9).filter(str.strip)
SPELLINGS = st.sampled_from(["Why?", "why", " WHY "]) | TEXT
KINDS = st.sampled_from(["add", "add", "update", "delete"])
DONE = st.tuples(KINDS, SPELLINGS, TEXT, st.integers(0, 9))


@settings(max_examples=8)
@given(st.lists(DONE, max_size=15))
def test_whatever_is_done_the_entries_are_what_the_log_replays_to(tmp_path_factory, done):
    """Against a dict, and through an export and an import."""
    folder, now = tmp_path_factory.mktemp("log"), {}
    memory = Memory(folder / "memory.sqlite")
    for kind, question, feedback, pick in done:
        entries = list(memory)
        known = entries[pick % len(entries)] if entries else None
        if kind == "add":
            memory.add(question, feedback)
            now[plain(question)] = feedback
        elif known is not None and kind == "update":
            memory.update(known.id, feedback)
            now[plain(known.question)] = feedback
        elif known is not None:
            memory.delete(known.id)
            del now[plain(known.question)]
        assert (told(memory), len(memory)) == (now, len(now))
    memory.verify()
    entries, events = list(memory), memory.events()
    assert [memory.get(e.id) for e in entries] == entries == replay(events)
    if events:
        memory.export(folder / "log.jsonl")
        with Memory(folder / "other.sqlite") as other:
            # What is twice in a log, to the microsecond, is once in another.
            assert 0 < other.import_(folder / "log.jsonl") <= len(events)
            assert told(other) == now
            assert other.import_(folder / "log.jsonl") == 0
    memory.close()


def test_a_line_that_cannot_be_kept_is_refused_with_its_place(tmp_path):
    good = {"question": "a", "feedback": "one"}
    lines = [good, good | {"feedback": "red \x1b[31m"}]
    with pytest.raises(DataError, match="line 2"):
        read_events(write_jsonl(tmp_path / "log.jsonl", lines))
    assert len(read_events(write_jsonl(tmp_path / "log.jsonl", [good]))) == 1  # the control


WRITER = """
import itertools, sys
import pgra
with pgra.Memory(sys.argv[1]) as memory:
    for number in itertools.count():
        entry = memory.add(f"{sys.argv[2]} {number}", f"said {number} " + "x" * 500)
        print(entry.id, entry.question, flush=True)
"""


@pytest.mark.slow
def test_what_is_acknowledged_survives_a_kill(tmp_path):
    path, acknowledged = tmp_path / "memory.sqlite", []
    # Both make the file, and are killed where they happen to be.
    words = [[sys.executable, "-c", WRITER, str(path), name] for name in ("one", "two")]
    writers = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in words]
    for writer in writers:
        acknowledged += [writer.stdout.readline() for _ in range(40)]
    for writer in writers:
        writer.kill()
        acknowledged += [line for line in writer.stdout if line.endswith("\n")]
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
    with Memory(path) as memory:
        memory.verify()
        written = [f"{one.id} {one.question}\n" for one in memory.events()]
    assert len(acknowledged) >= 80
    assert set(acknowledged) <= set(written)
    assert [int(line.split()[0]) for line in written] == list(range(1, len(written) + 1))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A memory of which some was updated and deleted."""
    path = tmp_path_factory.mktemp("kept") / "memory.sqlite"
    with Memory(path) as memory:
        memory.log.append(event(f"key {i}", f"said {i}") for i in range(12))
        memory.update(3, "another")
        memory.delete(5)
        entries = list(memory)
    return path, entries


@settings(max_examples=10)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_hides_an_entry_or_shows_another(kept, place, bit):
    (whole, entries), path = kept, kept[0].with_name("spoilt.sqlite")
    for old in path.parent.glob("spoilt*"):
        old.unlink()
    bad = bytearray(whole.read_bytes())
    used = [at for at, byte in enumerate(bad) if byte]
    bad[used[int(place * len(used))]] ^= 1 << bit
    path.write_bytes(bad)
    with contextlib.suppress(ArtifactError), Memory(path) as memory:
        assert list(memory) == entries
        memory.update(1, "one more")
        assert [e.id for e in memory] == [*(e.id for e in entries[1:]), 15]


def test_a_damaged_letter_or_page_is_named_and_the_rest_is_read(memory, tmp_path, caplog):
    memory.log.append(event(f"key {i}", f"said {i} " + "x" * 500) for i in range(600))
    memory.delete(1)
    memory.close()
    path, data = memory.path, bytearray(memory.path.read_bytes())
    path.write_bytes(data.replace(b"said 1 ", b"sAid 1 "))
    with pytest.raises(ArtifactError, match="event 2"), Memory(path) as bad:
        list(bad)
    data[6 * 65_536 : 7 * 65_536] = bytes(65_536)
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=str(path)):
        Memory(path)
    with Memory(tmp_path / "new.sqlite") as other:
        num_kept = other.import_(path)
        assert 400 < num_kept < 551
        events = other.events()
        assert (len(events), events[-1].kind) == (num_kept, "delete")  # of the first entry
        left = [one for one in events if one.question != events[-1].question]
        assert told(other) == {one.question: one.feedback for one in left}
        assert other.import_(path) == 0
    assert bytes(data) == path.read_bytes()  # the damaged one stays
    assert f"{601 - num_kept} events are lost" in caplog.text


def test_what_was_not_written_back_yet_is_read_of_a_damaged_memory_too(memory, tmp_path):
    memory.add("a", "in the write-ahead log")
    wal, copy = memory.path.with_name("memory.sqlite-wal"), tmp_path / "copy.sqlite"
    assert b"in the write-ahead log" in wal.read_bytes()
    copy.write_bytes(b"?" * memory.path.stat().st_size)
    copy.with_name("copy.sqlite-wal").write_bytes(wal.read_bytes())
    assert [entry.question for entry in read_events(copy)] == ["a"]


# Erasing: nothing of a text is left in any file, whatever happens meanwhile.

SECRET, MEANT = "the secret question of anna", "her secret answer"


def holding(folder, *texts):
    """Say which files under a folder hold one of these texts."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    wanted = [text.encode() for text in texts]
    return [path.name for path in files if any(text in path.read_bytes() for text in wanted)]


def test_what_is_erased_is_in_no_file_and_the_log_says_when(memory, tmp_path):
    memory.log.append(event(f"key {i}", f"said {i} " + "x" * 500) for i in range(150))
    first = memory.add(SECRET, "another secret").id
    memory.delete(memory.update(first, MEANT).id)
    memory.add(SECRET, MEANT)
    memory.log.append(event(f"more {i}", f"said {i} " + "x" * 500) for i in range(200))
    bert = Memory(memory.path, user="bert", source="me")
    other = bert.add("another", "of another user")
    assert holding(tmp_path, SECRET)  # the control
    before = list(memory)
    assert memory.erase(first) == 4  # also what was updated and deleted
    assert holding(tmp_path, SECRET, MEANT, "another secret") == []
    assert list(memory) == [entry for entry in before if entry.question != SECRET]
    memory.verify()
    with pytest.raises(DataError, match=f"entry {first}"):
        memory.erase(1, first)
    assert "key 0" in told(memory)  # all or none
    with bert:
        assert bert.erase_all() == 1
    erased = [e for e in memory.events() if e.kind == "erase"]
    assert [(e.id, e.source) for e in erased] == [(other.id + 1, "user"), (other.id + 2, "me")]


ATTEMPTS = {
    "import": (lambda memory: memory.import_(memory.path.with_name("log.jsonl")), [3, 0]),
    "update": (lambda memory: memory.update(1, "other").id, [3, None]),
    "erase": (lambda memory: memory.erase(1), [1, None]),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_two_at_once_change_what_one_after_the_other_would(name, memory):
    """Both start while the file is held, so that what they read first would be stale."""
    change, wanted = ATTEMPTS[name]
    lines = [{"question": text, "feedback": "a synonym"} for text in "aba"]
    write_jsonl(memory.path.with_name("log.jsonl"), lines)
    if name != "import":
        memory.add("x", "one")
        memory.add("y", "two")

    def attempt(_):
        with Memory(memory.path) as own:
            try:
                return change(own)
            except DataError:
                return None

    holder = sqlite3.connect(memory.path, isolation_level=None)
    with contextlib.closing(holder), ThreadPoolExecutor(2) as pool:
        holder.execute("BEGIN IMMEDIATE")
        done = pool.map(attempt, range(2))
        time.sleep(0.2)
        holder.execute("COMMIT")
        assert sorted(done, key=wanted.index) == wanted
    memory.verify()
