"""Look-ups, their vectors, and the gate."""

import json
import random
import string
from dataclasses import replace

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from pgra.core import Context
from pgra.memory.families import load_family
from pgra.memory.log import Event, FeedbackLog, Part
from pgra.memory.lookup import (
    LOOKUPS,
    Bm25Lookup,
    EditLookup,
    EncoderLookup,
    LookupArguments,
    Match,
    RelativeEditLookup,
    find_collisions,
    load_lookup,
    normalize_key,
    strip_slot,
)
from pgra.memory.vectors import KeyVectors, erase_vectors

CPU = Context(device="cpu")


class LetterEncoder:
    """Counts of letters, at unit length: real vectors whose cosines can be worked out by hand."""

    width = 26

    def __init__(self, name="letters"):
        self.query_fingerprint = {"encoder": name}

    def encode(self, texts, *, is_query=False):
        counts = np.array([[t.count(chr(97 + i)) for i in range(26)] for t in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def found(lookup, question, k=1):
    return [(match.entry.feedback, round(match.score, 3)) for match in lookup.find(question, k)]


class Own(EditLookup):
    """A look-up of a user's own."""


@pytest.mark.parametrize("name", [*sorted(LOOKUPS), f"{__name__}:Own"])
def test_every_look_up_keeps_the_contract(name, log, encoder_dir, t5_dir):
    args = LookupArguments(
        lookup=name, encoder=str(encoder_dir), generator=str(t5_dir) if name == "gud-ir" else None
    ).settle()
    lookup = load_lookup(args, CPU, task="t")(log)
    assert lookup.find("the film is warm") == []
    log.write("the film is warm", "one", task="t")
    log.write("the boats by the sea", "two", task="t")
    log.write("the film is warm", "of another task")
    before = lookup.find("the film is warm", 5)
    scores = [match.score for match in before]
    assert scores == sorted(scores, reverse=True)
    assert {match.entry.task for match in before} <= {"t"}
    assert lookup.find("the film is warm", 1) == before[:1]
    assert load_lookup(args, CPU, task="t")(log).find("the film is warm", 5) == before
    log.write("the film is warm", "three", task="t")
    if name != "gud-ir":  # which compares what an untrained model writes
        feedback = [match.entry.feedback for match in before + lookup.find("the film is warm")]
        assert (feedback[0], feedback[-1]) == ("one", "three")
    # Of what is the same a scope's own wins, and no other scope is seen.
    for scope, feedback in (("anna", "four"), ("", "five"), ("bert", "six")):
        log.write("the film is warm", feedback, task="t", scope=scope)
    of_anna = load_lookup(args, CPU, task="t", scope="anna")(log).find("the film is warm", 9)
    assert {match.entry.feedback for match in of_anna} <= {"four", "five", "two"}
    everybodys = {match.entry.scope for match in lookup.find("the film is warm", 9)}
    assert everybodys == {""}
    if name != "gud-ir":
        assert of_anna[0].entry.feedback == "four"
    # What is erased is not found by who had found it before, and what is near it then is.
    log.erase(next(e.id for e in log.entries() if e.feedback == "five"))
    left = [match.entry.feedback for match in lookup.find("the film is warm by the sea", 9)]
    assert left == ["two"]
    log.forget(*(entry.id for entry in log.entries()))
    assert lookup.find("the film is warm", 5) == []
    assert json.dumps(dict(lookup.fingerprint))


def test_a_key_is_what_stands_around_the_slot():
    assert normalize_key("< pot >  Can be used, how?") == "can be used how"
    assert strip_slot("Find it in < p<i o/n>e! > ?") == "Find it in ?"


COLLISIONS = {"lexical": (1, 0), "hindi": (7, 1), "punjabi": (2, 4), "scramble": (0, 3)}


def test_the_phrasings_collide_as_the_papers_do_and_a_key_of_two_meanings_with_itself():
    """Pairs within the release's distance, of different types and of one type."""
    for name, counts in COLLISIONS.items():
        ways = load_family(name).phrasings
        across = find_collisions([Event(key=way.question, feedback=way.type) for way in ways])
        all_pairs = find_collisions([Event(key=way.question, feedback=way.id) for way in ways])
        assert (len(across), len(all_pairs) - len(across)) == counts, name
    keys = ["is < a > ?", "is < b >", "is < c >"]
    one, two, three = [
        Event(key=key, feedback=meant) for key, meant in zip(keys, "xyx", strict=True)
    ]
    assert find_collisions([one, two, three]) == [(two, Match(three, 0))]
    assert find_collisions([one, replace(two, feedback="x"), three]) == []  # the control


KEY = st.text("ab cd", min_size=1, max_size=7).filter(str.strip)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    changes=st.lists(st.tuples(KEY, KEY, st.booleans()), max_size=12),
    question=KEY,
    k=st.integers(1, 4),
    form=st.sampled_from(["slotless", "feedback"]),
)
def test_edit_distance_finds_what_comparing_every_entry_finds(
    tmp_path_factory, changes, question, k, form
):
    """Whatever was written, corrected and forgotten before, and between two questions."""
    with FeedbackLog.open(tmp_path_factory.mktemp("log") / "m.sqlite") as log:
        lookup, first = EditLookup(log, form=form), {}
        for key, feedback, is_written in changes:
            found = [entry.id for entry in log.entries() if entry.key == key]
            if is_written:
                log.write(key, feedback)
            else:
                log.forget(*found)
            lookup.find(question)
            newest = {}
            for entry in log.entries():
                text = entry.feedback if form == "feedback" else entry.key
                newest[normalize_key(text)] = entry.id
            first = {c: n for c, n in first.items() if c in newest}
            for c in newest:
                first.setdefault(c, log.last_id)
        distances = {c: Levenshtein.distance(c, normalize_key(question)) for c in first}
        nearest = sorted(first, key=lambda c: (distances[c], first[c]))[:k]
        matches = lookup.find(question, k)
        assert [match.entry.id for match in matches] == [newest[c] for c in nearest]
        assert [match.score for match in matches] == [-distances[c] for c in nearest]


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=5).map(" ".join)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    changes=st.lists(st.tuples(WORDS, st.sampled_from(["", "", "s"]), st.booleans()), max_size=14),
    question=WORDS,
    k=st.integers(1, 4),
)
def test_bm25_that_follows_gives_what_an_index_made_anew_gives(
    tmp_path_factory, changes, question, k
):
    """Equal to the last digit, and to `bm25s` but for float32; whatever was done in between."""
    part = Part(scope="s")
    with FeedbackLog.open(tmp_path_factory.mktemp("log") / "m.sqlite") as log:
        following = Bm25Lookup(log, part)
        for number, (key, scope, is_written) in enumerate(changes):
            there = [e.id for e in log.entries() if (e.key, e.scope) == (key, scope)]
            if is_written:
                log.write(key, f"said {number}", scope=scope)
            elif there and number % 3 == 0:
                log.erase(*there)
            else:
                log.forget(*there)
            following.find(question, k)
        found = following.find(question, k)
        assert found == Bm25Lookup(log, part).find(question, k)
        entries = list(log.entries())
    if not entries:
        assert found == []
        return
    index = bm25s.BM25(k1=1.5, b=0.75, method="lucene", idf_method="lucene")
    index.index([entry.key.split() for entry in entries], show_progress=False)
    scores = index.get_scores(question.split())
    wanted = sorted(-round(float(x), 5) for x in scores if x > 0)[:k]
    assert [match.score for match in found] == pytest.approx([-x for x in wanted], abs=2e-5)


def test_a_relative_distance_is_that_worked_out_by_hand(log):
    log.write("Why?", "reason")
    log.write("what is C++", "language")
    lookup = RelativeEditLookup(log)
    assert found(lookup, "why") == [("reason", 1.0)]
    assert found(lookup, "who") == [("reason", round(1 - 2 / 6, 3))]  # y goes, o comes
    assert found(lookup, "WHAT  is c#?") == [("language", round(1 - 3 / 21, 3))]


def open_with(log, folder, name="letters", **more):
    vectors = KeyVectors(folder, LetterEncoder(name), **more)
    return vectors, vectors.follow(log)


def test_vectors_follow_the_log_also_behind_what_a_killed_job_left(log, tmp_path):
    folder = tmp_path / "v"
    log.write("ab", "one")
    assert open_with(log, folder)[1] == 1
    for name in ("vectors.f16", "ids.i64", "checksums.u64"):
        with (folder / name).open("ab") as file:
            file.write(b"\1" * 13)
    log.write("cd", "two")
    log.forget(log.write("ef", "three").id)
    again, count = open_with(log, folder)
    assert (count, again.follow(log), len(again)) == (1, 0, 2)
    assert list(again.search("cd", 2)) == [2, 1]


HARMS = {
    "torn state": lambda path: (path / "state.json").write_text("{"),
    "torn vectors": lambda path: (path / "vectors.f16").write_bytes(b"1"),
    "an earlier pgra": lambda path: rewrite_state(path, "index_checksum", "digest"),
    "another encoder": lambda path: open_other(path, "another"),
    "another log": lambda path: open_other(path, "letters"),
}


def rewrite_state(folder, *without):
    """What was written before there were checksums."""
    state = json.loads((folder / "state.json").read_text())
    kept = {name: value for name, value in state.items() if name not in without}
    (folder / "state.json").write_text(json.dumps(kept))
    (folder / "checksums.u64").unlink()


def open_other(folder, encoder):
    with FeedbackLog.open(folder.with_name("other.sqlite")) as other:
        other.write("xy", "one")
        open_with(other, folder, encoder)


@pytest.mark.parametrize("harm", HARMS)
def test_vectors_that_are_not_the_logs_are_made_again(log, tmp_path, caplog, harm):
    for key in ("ab", "cd", "ef"):
        log.write(key, key)
    assert [open_with(log, tmp_path / "v")[1] for _ in "12"] == [3, 0]
    HARMS[harm](tmp_path / "v")
    vectors, count = open_with(log, tmp_path / "v")
    assert (count, list(vectors.search("cd", 1))) == (3, [2])
    assert "is not what its log says: made again from it" in caplog.text


@given(
    name=st.sampled_from(["vectors.f16", "ids.i64", "checksums.u64", "state.json", "index"]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    index_rows=st.sampled_from([1, 100]),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_no_flipped_bit_hides_an_entry_and_vectors_are_made_again(
    name, place, bit, index_rows, tmp_path_factory
):
    root = tmp_path_factory.mktemp("flip")
    keys = ["ab", "cd", "ef", "gh", "ij"]
    with FeedbackLog.open(root / "memory.sqlite") as log:
        log.extend(Event(key=key, feedback=key) for key in keys)
        before, count = open_with(log, root / "v", index_rows=index_rows)
        assert count == 5
        found = {key: before.search(key, 1) for key in keys}
        assert list(found["gh"]) == [4]
        assert open_with(log, root / "v", index_rows=index_rows)[1] == 0  # what is whole is kept
        if name == "index":
            if index_rows == 100:
                return
            name = "index-5.faiss"
        path = root / "v" / name
        data = bytearray(path.read_bytes())
        data[int(place * len(data))] ^= 1 << bit
        path.unlink()  # who has the old one mapped keeps it
        path.write_bytes(data)
        after, count = open_with(log, root / "v", index_rows=index_rows)
        assert {key: after.search(key, 1) for key in keys} == found
        again, _ = open_with(log, root / "v", index_rows=index_rows)
        assert {key: again.search(key, 1) for key in keys} == found
        assert count == 5 or index_rows == 1  # behind an index, when a search reads it


def test_the_vector_of_what_is_erased_is_gone_and_the_others_stay(log, tmp_path):
    folder = log.path.with_name("memory.sqlite.vectors") / "v"
    for key in ("ab", "cd", "ef"):
        log.write(key, key)
    vectors, _ = open_with(log, folder, index_rows=1)
    stored = np.fromfile(folder / "vectors.f16", np.float16).reshape(3, 26)
    assert stored.any(axis=1).all()
    assert list(folder.glob("index-*"))  # the controls
    log.erase(2, 3)  # the last one, which the state knows by its checksum
    left = np.fromfile(folder / "vectors.f16", np.float16).reshape(3, 26)
    assert left.any(axis=1).tolist() == [True, False, False]
    assert list(folder.glob("index-*")) == []
    assert vectors.follow(log) == 0  # nothing is encoded again
    lookup = EncoderLookup(log, vectors)
    assert found(lookup, "cd", 3) == [("ab", 0)]
    (folder / "state.json").write_text("{")
    log.erase(1)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_an_erasure_that_was_killed_is_ended_as_if_it_had_not_been(log):
    folder = log.path.with_name("memory.sqlite.vectors") / "v"
    log.extend(Event(key=key, feedback=key) for key in ("ab", "cd", "ef"))
    open_with(log, folder)
    names = ("vectors.f16", "checksums.u64", "state.json")  # in the order they are written
    before = [(folder / name).read_bytes() for name in names]
    log.erase(2, 3)
    after = [(folder / name).read_bytes() for name in names]
    assert all(one != other for one, other in zip(before, after, strict=True))  # the control
    for done in range(3):
        for name, data in zip(names, [*after[:done], *before[done:]], strict=True):
            (folder / name).write_bytes(data)
        erase_vectors(log)
        assert [(folder / name).read_bytes() for name in names] == after
    # The control: a vector that is kept, half written by something else.
    (folder / "vectors.f16").write_bytes(b"\0" + after[0][1:])
    erase_vectors(log)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_damaged_id_does_not_save_a_vector_from_being_erased(log):
    folder = log.path.with_name("memory.sqlite.vectors") / "v"
    log.extend(Event(key=key, feedback=key) for key in ("ab", "cd"))
    open_with(log, folder)
    (folder / "ids.i64").write_bytes(np.array([7, 2]).tobytes())
    log.erase(1)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_an_index_and_the_tail_behind_it_give_what_exact_search_gives(log, tmp_path):
    draw = random.Random(0)
    keys = ["".join(draw.choices(string.ascii_lowercase, k=30)) for _ in range(300)]
    log.extend(Event(key=key, feedback=key) for key in keys[:280])
    exact, _ = open_with(log, tmp_path / "exact")
    indexed, _ = open_with(log, tmp_path / "indexed", index_rows=100)
    assert (tmp_path / "indexed" / "index-280.faiss").exists()  # the control
    log.extend(Event(key=key, feedback=key) for key in keys[280:])
    assert exact.follow(log) == indexed.follow(log) == 20
    same = [list(indexed.search(key, 1)) == list(exact.search(key, 1)) for key in keys[::10]]
    assert sum(same) >= 28  # of 30; an index of lists may miss one
    again, count = open_with(log, tmp_path / "indexed", index_rows=100)
    assert (count, list(again.search(keys[295], 1))) == (0, [296])


@pytest.mark.parametrize(
    ("name", "lookup", "key_form", "gate"),
    [
        ("lexical", "edit", "slotless", -5),
        ("webquestions", "edit", "whole", None),
        ("ert_cat", "edit", "whole", -5),
        ("own", "relative-edit", "whole", 0.85),
    ],
)
def test_the_papers_rule_is_for_the_papers_families(name, lookup, key_form, gate, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"prompt": "webquestions", "words": "answers", "num_remembered": 8}))
    family = load_family(str(own) if name == "own" else name)
    args = LookupArguments().settle(family)
    assert (args.lookup, args.key_form, args.gate_of(family)) == (lookup, key_form, gate)
    assert LookupArguments(threshold=0.0).settle(family).gate_of(family) == 0  # given: it counts
