"""Look-ups, their vectors, and the gate."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from pgra.config import config_root
from pgra.core import Context
from pgra.errors import ConfigError
from pgra.memory.families import list_yamls, load_family
from pgra.memory.log import Event, FeedbackLog
from pgra.memory.lookup import (
    LOOKUPS,
    Collision,
    EditLookup,
    EncoderLookup,
    KeyEncoder,
    LookupArguments,
    Match,
    RelativeEditLookup,
    ScoreRange,
    find_collisions,
    load_lookup,
    normalize_key,
    strip_slot,
)
from pgra.memory.vectors import KeyVectors

CPU = Context(device="cpu")


@pytest.fixture
def log(tmp_path):
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        yield log


class LetterEncoder:
    """Counts of letters, at unit length: real vectors whose cosines can be worked out by hand."""

    width = 26

    def __init__(self, name="letters"):
        self.query_fingerprint = {"encoder": name}
        self.num_texts = 0

    def encode(self, texts, *, is_query=False):
        self.num_texts += len(texts)
        counts = np.array([[t.count(chr(97 + i)) for i in range(26)] for t in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def found(lookup, question, k=1):
    return [(match.entry.feedback, round(match.score, 3)) for match in lookup.find(question, k)]


class ByLength:
    """A look-up of a user's own: the entry whose key is as long."""

    scores = ScoreRange(-2.0, -99.0, 0.0, "a difference of lengths counts below 0")

    def __init__(self, log, task=""):
        self._log, self._task, self.fingerprint = log, task, {"lookup": "length"}

    @classmethod
    def load(cls, args, task, context):
        return lambda log: cls(log, task)

    def find(self, question, k=1):
        entries = [entry for entry in self._log.entries() if entry.task == self._task]
        matches = [Match(e, -abs(len(e.key) - len(question))) for e in entries]
        return sorted(matches, key=lambda match: (-match.score, -match.entry.id))[:k]


@pytest.mark.parametrize("name", [*sorted(LOOKUPS), f"{__name__}:ByLength"])
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
    assert [
        match.entry.id
        for match in load_lookup(args, CPU, task="t")(log).find("the film is warm", 5)
    ] == [match.entry.id for match in before]
    assert lookup.scores.least <= lookup.scores.gate <= lookup.scores.most
    if name != "gud-ir":  # which compares what an untrained model writes
        assert before[0].entry.feedback == "one"
        log.write("the film is warm", "three", task="t")
        assert lookup.find("the film is warm")[0].entry.feedback == "three"
    for entry in log.entries():
        log.forget(entry.id)
    assert lookup.find("the film is warm", 5) == []
    assert lookup.fingerprint["lookup"] in (name, "length")
    assert json.dumps(dict(lookup.fingerprint))


@pytest.mark.parametrize(
    ("question", "key"),
    [
        ("What is akin to < fast > ?", "what is akin to"),
        ("< pot >  can be used, how?", "can be used how"),
        ("Find it in < p<i o/n>e! >", "find it in"),  # from the first < to the last >
        ("No slot HERE", "no slot here"),
    ],
)
def test_a_key_is_what_stands_around_the_slot(question, key):
    assert normalize_key(question) == key
    assert "<" not in strip_slot(question)


COLLISIONS = {"lexical": (1, 0), "hindi": (7, 1), "punjabi": (2, 4), "scramble": (0, 3)}


@pytest.mark.parametrize("name", sorted(COLLISIONS))
def test_the_phrasings_collide_as_the_papers_do(name):
    """Pairs within the release's distance, of different types and of one type (seed facts 5.2)."""
    ways = load_family(name).phrasings
    keys = [way.question for way in ways]
    across = find_collisions(keys, [way.type for way in ways])
    all_pairs = find_collisions(keys, [way.id for way in ways])
    assert (len(across), len(all_pairs) - len(across)) == COLLISIONS[name]


def test_one_key_with_two_meanings_collides_with_itself():
    keys, meanings = ["is < a > ?", "is < b >", "is < c >"], ["x", "y", "x"]
    assert find_collisions(keys, meanings) == [Collision(1, 2, 0)]
    assert find_collisions(keys, ["x", "x", "x"]) == []  # the control


KEY = st.text("ab cd", min_size=1, max_size=7).filter(str.strip)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    changes=st.lists(st.tuples(KEY, st.sampled_from(["write", "forget"])), max_size=12),
    question=KEY,
    k=st.integers(1, 4),
)
def test_edit_distance_finds_what_comparing_every_entry_finds(
    tmp_path_factory, changes, question, k
):
    """Whatever was written and forgotten before, and between two questions."""
    with FeedbackLog.open(tmp_path_factory.mktemp("log") / "m.sqlite") as log:
        lookup, now, first = EditLookup(log), {}, {}
        for number, (key, kind) in enumerate(changes):
            if kind == "write":
                now.pop(key, None)
                now[key] = log.write(key, f"said {number}")
            elif key in now:
                log.forget(now.pop(key).id)
            if number % 3 == 0:
                lookup.find(question)
            compared = {normalize_key(k) for k in now}
            first = {c: n for c, n in first.items() if c in compared}
            for c in compared:
                first.setdefault(c, number)
        distances = {c: Levenshtein.distance(c, normalize_key(question)) for c in first}
        nearest = sorted(first, key=lambda c: (distances[c], first[c]))[:k]
        newest = [max(e.id for key, e in now.items() if normalize_key(key) == c) for c in nearest]
        matches = lookup.find(question, k)
        assert [match.entry.id for match in matches] == newest
        assert [match.score for match in matches] == [-distances[c] for c in nearest]


def test_a_relative_distance_is_that_worked_out_by_hand(log):
    log.write("Why?", "reason")
    log.write("what is C++", "language")
    lookup = RelativeEditLookup(log)
    assert found(lookup, "why") == [("reason", 1.0)]
    assert found(lookup, "whyy") == [("reason", round(1 - 1 / 7, 3))]
    assert found(lookup, "who") == [("reason", round(1 - 2 / 6, 3))]  # y goes, o comes
    assert found(lookup, "WHAT  is c#?") == [("language", round(1 - 3 / 21, 3))]
    log.write("?!", "marks")
    assert found(lookup, "?!") == [("marks", 1.0)]


def test_edit_distance_looks_among_the_feedback_and_follows_corrections(log):
    lookup = EditLookup(log, of_feedback=True)
    log.write("q1", "a synonym")
    log.write("q2", "an antonym")
    log.write("q3", "a synonym!")  # the same once normalised, and newer
    assert found(lookup, "a synonyn") == [("a synonym!", -1.0)]
    log.correct(3, "a definition")
    assert found(lookup, "a synonyn") == [("a synonym", -1.0)]
    log.write("q1", "an antonym")  # rewritten: what it said before is gone
    assert found(lookup, "a synonym")[0][0] == "an antonym"
    assert found(EditLookup(log), "q3") == [("a definition", 0.0)]  # by keys: the control


def test_the_encoder_finds_by_cosine_and_of_equals_the_newest(log, tmp_path):
    lookup = EncoderLookup(log, KeyVectors(tmp_path / "v", LetterEncoder()))
    log.write("ab", "first")
    log.write("aabb", "second")  # the same direction
    log.write("cd", "third")
    assert found(lookup, "ab", 3) == [("second", 1.0), ("first", 1.0), ("third", 0.0)]
    log.write("ab", "again")  # the release gave the next key's feedback after a rewrite
    assert found(lookup, "ab", 9) == [("again", 1.0), ("second", 1.0), ("third", 0.0)]
    assert found(lookup, "cd") == [("third", 1.0)]


def test_what_is_forgotten_or_of_another_task_is_looked_past(log, tmp_path):
    vectors = KeyVectors(tmp_path / "v", LetterEncoder())
    ids = [log.write("ab" * (i + 1), f"no {i}", task="other").id for i in range(20)]
    log.write("abc", "yes")
    assert found(EncoderLookup(log, vectors), "ab", 2) == [("yes", 0.816)]
    log.forget(*ids[:19])
    assert found(EncoderLookup(log, vectors, task="other"), "ab") == [("no 19", 1.0)]


def open_with(log, folder, encoder=None, **more):
    vectors = KeyVectors(folder, encoder or LetterEncoder(), **more)
    return vectors, vectors.follow(log)


def test_vectors_follow_the_log_also_behind_what_a_killed_job_left(log, tmp_path):
    encoder, folder = LetterEncoder(), tmp_path / "v"
    log.write("ab", "one")
    assert open_with(log, folder, encoder)[1] == 1
    for name in ("vectors.f16", "ids.i64"):
        with (folder / name).open("ab") as file:
            file.write(b"\1" * 13)
    log.write("cd", "two")
    log.forget(log.write("ef", "three").id)
    again, count = open_with(log, folder, encoder)
    assert (count, again.follow(log), len(again), encoder.num_texts) == (1, 0, 2, 2)
    assert list(again.search("cd", 2)) == [2, 1]
    by_feedback, _ = open_with(log, tmp_path / "f", of_feedback=True)
    assert list(by_feedback.search("two", 1)) == [2]


HARMS = {
    "torn state": lambda path: (path / "state.json").write_text("{"),
    "torn vectors": lambda path: (path / "vectors.f16").write_bytes(b"1"),
    "no ids": lambda path: (path / "ids.i64").unlink(),
    "another encoder": lambda path: open_other(path, LetterEncoder("another")),
    "another log": lambda path: open_other(path, LetterEncoder()),
}


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


def test_an_index_and_the_tail_behind_it_give_what_exact_search_gives(log, tmp_path):
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    keys = ["".join(draw.choice(letters, 30)) for _ in range(300)]
    log.extend(Event(key=key, feedback=key) for key in keys[:280])
    exact, _ = open_with(log, tmp_path / "exact")
    indexed, _ = open_with(log, tmp_path / "indexed", index_rows=100)
    assert (tmp_path / "indexed" / "index-280.faiss").exists()
    assert not list((tmp_path / "exact").glob("*.faiss"))
    log.extend(Event(key=key, feedback=key) for key in keys[280:])
    assert exact.follow(log) == indexed.follow(log) == 20
    same = [list(indexed.search(key, 1)) == list(exact.search(key, 1)) for key in keys[::10]]
    assert sum(same) >= 28  # of 30; an index of lists may miss one
    deep, wide = indexed.search(keys[0], 200), exact.search(keys[0], 200)
    assert list(deep) == list(wide)  # so many are compared one by one
    again, count = open_with(log, tmp_path / "indexed", index_rows=100)
    assert (count, list(again.search(keys[295], 1))) == (0, [296])


def test_a_real_encoders_vectors_lie_beside_the_memory(log, encoder_dir):
    args = LookupArguments(lookup="encoder", encoder=str(encoder_dir), key_form="slotless")
    lookup = load_lookup(args, CPU)(log)
    log.write("The film is < warm > and funny", "a synonym")
    assert found(lookup, "The film is < dull > and funny") == [("a synonym", 1.0)]
    (folder,) = log.path.with_name("memory.sqlite.vectors").iterdir()
    assert folder.name.startswith(encoder_dir.name)
    whole = KeyEncoder(str(encoder_dir), "whole", device="cpu")
    one, other = whole.encode(["The film is < warm >", "The film is < dull >"])
    assert one @ other < 0.9999  # the control: the word counts where it is read


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lookup": "gud-ir"}, "name it with --generator FOLDER"),
        ({"lookup": "edit", "threshold": 5.0}, "an edit distance counts below 0"),
        ({"threshold": float("nan")}, "threshold is nan: give a number that a score can reach"),
        ({"lookup": "relative-edit", "key_form": "slotless"}, "compares whole questions"),
    ],
)
def test_a_look_up_that_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LookupArguments(**values)


OWN_FAMILIES = {
    "answers": ({"prompt": "webquestions", "words": "answers", "num_remembered": 8}, False),
    "slots": (None, True),  # the lexical family in a file of one's own
}


@pytest.mark.parametrize("name", [*list_yamls("memory"), *OWN_FAMILIES])
def test_the_papers_rule_is_for_the_papers_families_and_for_slots(name, tmp_path):
    known, path = OWN_FAMILIES.get(name), tmp_path / "own.yaml"
    if known is not None:
        lexical = (config_root() / "memory" / "lexical.yaml").read_text()
        path.write_text(lexical if known[0] is None else json.dumps(known[0]))
    family = load_family(name if known is None else str(path))
    args = LookupArguments().settle(family)
    released = known is None or known[1]
    assert args.lookup == ("edit" if released else "relative-edit")
    assert args.key_form == ("slotless" if family.phrasings else "whole")
    open_gate = name == "webquestions"
    assert args.gate_of(family) == (None if open_gate else -5 if released else 0.85)
    assert LookupArguments(threshold=0.0).settle(family).gate_of(family) == 0  # given: it counts
