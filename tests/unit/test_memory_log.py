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
from pgra.memory.log import (
    MAX_FEEDBACK_CHARS,
    MAX_KEY_CHARS,
    Event,
    FeedbackLog,
    export_log,
    import_events,
    read_events,
    replay,
    salvage,
    unpack,
)


def event(key="what is like", feedback="a synonym"):
    return Event(key=key, feedback=feedback, time="2026-01-01")


def told(log):
    return {entry.key: entry.feedback for entry in log.entries()}


def test_a_change_is_whole_or_not_at_all_and_of_one_task(log):
    first, second = log.write("a", "one"), log.write("b", "two")
    log.write("a", "of another task", task="t")
    log.forget(first.id)
    with pytest.raises(DataError, match="no entry 1 now: pgra memory list shows"):
        log.forget(second.id, first.id)

    def events():
        yield event()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.extend(events())
    with FeedbackLog.open(log.path) as other:  # another process's view
        assert told(other) == {"b": "two", "a": "of another task"}


def test_a_memory_that_was_moved_or_replaced_is_not_written(log, monkeypatch, tmp_path):
    log.write("a", "one")
    aside = log.path.with_name("aside.sqlite")
    monkeypatch.chdir(tmp_path)
    log.write("b", "two")  # wherever the process is
    log.path.rename(aside)
    with pytest.raises(ArtifactError, match="was moved, removed or replaced while it is open"):
        log.write("c", "three")
    shutil.copy(aside, log.path)
    with pytest.raises(ArtifactError, match="was moved"):
        log.forget(1)
    aside.replace(log.path)
    log.write("c", "three")  # the control
    log.close()
    with FeedbackLog.open(log.path) as other:
        assert told(other) == {"a": "one", "b": "two", "c": "three"}


LETTERS = st.characters(exclude_categories=["Cs", "Cc"])
TEXT = st.text(LETTERS, min_size=1, max_size=9).filter(str.strip)
KINDS = st.sampled_from(["write", "write", "correct", "forget", "reopen"])
DONE = st.tuples(KINDS, TEXT, TEXT, st.integers(0, 9))


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.lists(DONE, max_size=15))
def test_whatever_is_done_the_entries_are_what_the_log_replays_to(tmp_path_factory, done):
    """Against a dict, with the file opened anew, and through an export and an import."""
    folder, now = tmp_path_factory.mktemp("log"), {}
    log = FeedbackLog.open(folder / "memory.sqlite")
    for kind, key, feedback, pick in done:
        entries = list(log.entries())
        known = entries[pick % len(entries)] if entries else None
        if kind == "write":
            log.write(key, feedback)
            now[key] = feedback
        elif kind == "reopen":
            log.close()
            log = FeedbackLog.open(folder / "memory.sqlite")
        elif known is not None and kind == "correct":
            log.correct(known.id, feedback)
            now[known.key] = feedback
        elif known is not None:
            log.forget(known.id)
            del now[known.key]
        assert told(log) == now
    log.verify()
    entries, events = list(log.entries()), list(log.events())
    assert log.get([e.id for e in reversed(entries)]) == entries[::-1]
    assert replay(events) == entries
    assert [unpack(e.pack()) for e in events] == events
    if events:
        export_log(log, folder / "log.jsonl")
        read = read_events(folder / "log.jsonl")
        with FeedbackLog.open(folder / "other.sqlite") as other:
            # What is twice in a log, to the microsecond, is once in another.
            assert 0 < import_events(other, read) <= len(events)
            assert told(other) == now
            assert import_events(other, read) == 0
    log.close()


def test_the_longest_event_fits_a_page_so_that_its_record_is_in_one_piece(log):
    longest = event(key="\U0001f600" * MAX_KEY_CHARS, feedback='"' * MAX_FEEDBACK_CHARS)
    log.extend([longest, event()])
    first = next(log.events())
    log.close()
    assert first.pack() in log.path.read_bytes()
    assert len(longest.pack()) < 65_000


def test_a_line_that_cannot_be_kept_is_refused_with_its_place(tmp_path):
    good = {"key": "a", "feedback": "one"}
    lines = [good, good | {"feedback": "red \x1b[31m"}]
    with pytest.raises(DataError, match="line 2: .*control character"):
        read_events(write_jsonl(tmp_path / "log.jsonl", lines))
    label = {"key": "a", "feedback": -1}  # the control: a label of digits is its text
    assert read_events(write_jsonl(tmp_path / "log.jsonl", [label]))[0].feedback == "-1"


WRITER = """
import itertools, sys
from pathlib import Path
from pgra.memory.log import FeedbackLog
with FeedbackLog.open(Path(sys.argv[1])) as log:
    for number in itertools.count():
        entry = log.write(f"{sys.argv[2]} {number}", f"said {number} " + "x" * 500)
        print(entry.id, entry.key, flush=True)
"""


@pytest.mark.slow
def test_what_two_processes_were_told_is_written_is_there_after_they_are_killed(tmp_path):
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
    with FeedbackLog.open(path) as log:
        log.verify()
        written = [f"{one.id} {one.key}\n" for one in log.events()]
    assert len(acknowledged) >= 80
    assert set(acknowledged) <= set(written)
    assert [int(line.split()[0]) for line in written] == list(range(1, len(written) + 1))


def told_by(path):
    with FeedbackLog.open(path) as log:
        return list(log.entries())


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A memory of which some was corrected and forgotten."""
    path = tmp_path_factory.mktemp("kept") / "memory.sqlite"
    with FeedbackLog.open(path) as log:
        log.extend(event(f"key {i}", f"said {i}") for i in range(12))
        log.correct(3, "another")
        log.forget(5)
    return path


@settings(derandomize=True, deadline=None, max_examples=25)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_hides_an_entry_or_shows_another(kept, place, bit):
    good, path = kept.read_bytes(), kept.with_name("spoilt.sqlite")
    for old in path.parent.glob("spoilt*"):
        old.unlink()
    entries = told_by(kept)
    assert len(entries) == 11
    used = [at for at, byte in enumerate(good) if byte]
    bad = bytearray(good)
    bad[used[int(place * len(used))]] ^= 1 << bit
    path.write_bytes(bad)
    with contextlib.suppress(ArtifactError), FeedbackLog.open(path) as log:
        found = list(log.entries())
        assert found == entries
        log.correct(1, "one more")
        assert [e.id for e in log.entries()] == [*(e.id for e in entries[1:]), 15]


def test_a_damaged_letter_or_page_is_told_and_the_rest_is_salvaged(log, tmp_path):
    log.extend(event(key=f"key {i}", feedback=f"said {i} " + "x" * 500) for i in range(600))
    log.forget(1)
    log.close()
    path = log.path
    data = bytearray(path.read_bytes())
    path.write_bytes(data.replace(b"said 1 ", b"sAid 1 "))
    with pytest.raises(ArtifactError, match="event 2 is not what was written"):
        told_by(path)
    data[6 * 65_536 : 7 * 65_536] = bytes(65_536)
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{path} is damaged .*: pgra memory salvage {path}"):
        told_by(path)
    num_kept, lost = salvage(path, tmp_path / "new.sqlite")
    assert num_kept + len(lost) == 601
    assert 50 < len(lost) < 200
    assert bytes(data) == path.read_bytes()  # the damaged one stays
    # The first event is left out of the memory again, for its forgetting was salvaged.
    kept = {f"key {i - 1}" for i in range(2, 601) if i not in lost}
    assert {entry.key for entry in told_by(tmp_path / "new.sqlite")} == kept
    assert sorted(p.name for p in tmp_path.iterdir()) == ["memory.sqlite", "new.sqlite"]


def test_what_was_not_written_back_yet_is_salvaged_too(log, tmp_path):
    log.write("a", "in the write-ahead log")
    wal, copy = log.path.with_name("memory.sqlite-wal"), tmp_path / "copy.sqlite"
    assert b"in the write-ahead log" in wal.read_bytes()
    copy.write_bytes(b"?" * log.path.stat().st_size)
    copy.with_name("copy.sqlite-wal").write_bytes(wal.read_bytes())
    assert salvage(copy, tmp_path / "new.sqlite")[0] == 1
    assert [entry.key for entry in told_by(tmp_path / "new.sqlite")] == ["a"]


# Erasing: nothing of a text is left in any file, whatever happens meanwhile.

SECRET, MEANT = "the secret question of anna", "her secret answer"


def holding(folder, *texts):
    """Say which files under a folder hold one of these texts."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    wanted = [text.encode() for text in texts]
    return [path.name for path in files if any(text in path.read_bytes() for text in wanted)]


def fill(log):
    """Write an entry between others that is corrected, forgotten, and there again."""
    log.extend(event(key=f"key {i}", feedback=f"said {i} " + "x" * 500) for i in range(200))
    first = log.write(SECRET, "another secret")
    log.correct(first.id, MEANT)
    log.forget(log.last_id)
    log.write(SECRET, MEANT)
    log.extend(event(key=f"more {i}", feedback=f"said {i} " + "x" * 500) for i in range(200))
    return first.id


def test_what_is_erased_is_in_no_file_and_the_log_says_when(log, tmp_path):
    first = fill(log)
    other = log.write("another", "of another scope", scope="bert")
    assert holding(tmp_path, SECRET)  # the control
    before = list(log.entries())
    assert log.erase(first, source="me") == 4  # also what was corrected and forgotten
    assert holding(tmp_path, SECRET, MEANT, "another secret") == []
    assert list(log.entries()) == [entry for entry in before if entry.key != SECRET]
    told = [(e.id, e.source, e.key, e.feedback) for e in log.events() if e.kind == "erase"]
    assert told == [(other.id + 1, "me", "", "")]
    log.verify()
    with pytest.raises(DataError, match=f"entry {first} is not in the log"):
        log.erase(1, first)
    assert "key 0" in told_of(log)  # all or none
    export_log(log, tmp_path / "log.jsonl")
    with FeedbackLog.open(tmp_path / "other.sqlite") as copy:
        import_events(copy, read_events(tmp_path / "log.jsonl"))
        assert told_of(copy) == told_of(log)
        assert all(e.kind != "erase" for e in copy.events())
    assert log.erase_scope("bert") == 1
    assert {*holding(tmp_path, "of another scope")} == {"other.sqlite", "log.jsonl"}  # copies


def told_of(log):
    return [entry.key for entry in log.entries()]


ATTEMPTS = {
    "import": (lambda log: import_events(log, [event("a"), event("b"), event("a")]), [3, 0]),
    "correct": (lambda log: log.correct(2, "other").id, [3, None]),
    "erase": (lambda log: log.erase(1), [2, None]),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_two_at_once_change_what_one_after_the_other_would(name, log):
    """Both start while the file is held, so that what they read first would be stale."""
    change, wanted = ATTEMPTS[name]
    if name != "import":
        log.write("x", "one")
        log.forget(1) if name != "correct" else log.write("y", "two")

    def attempt(_):
        with FeedbackLog.open(log.path) as own:
            try:
                return change(own)
            except DataError:
                return None

    holder = sqlite3.connect(log.path, isolation_level=None)
    with contextlib.closing(holder), ThreadPoolExecutor(2) as pool:
        holder.execute("BEGIN IMMEDIATE")
        done = pool.map(attempt, range(2))
        time.sleep(0.2)
        holder.execute("COMMIT")
        assert sorted(done, key=wanted.index) == wanted
    log.verify()
