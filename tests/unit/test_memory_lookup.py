"""Look-ups, their vectors, and the gate."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.context import Context
from pgra.errors import ConfigError
from pgra.memory.families import load_family
from pgra.memory.log import MemoryEntry
from pgra.memory.lookup import (
    LOOKUPS,
    EditLookup,
    EncoderLookup,
    LookupArguments,
    ParaphraseLookup,
    RelativeEditLookup,
    in_form,
    load_lookup,
)
from pgra.memory.memory import Memory

CPU = Context(device="cpu")


class LetterEncoder:
    """Counts of letters, at unit length: real vectors whose cosines can be worked out by hand."""

    width = 26

    def __init__(self, name="letters"):
        self.query_fingerprint = {"encoder": name}
        self.encoded = []

    def encode(self, texts, *, is_query=False):
        self.encoded += texts
        letters = [chr(97 + i) for i in range(26)]
        counts = np.array([[t.lower().count(one) for one in letters] for t in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def found(lookup, question, k=1):
    return [(match.feedback, round(match.score, 3)) for match in lookup.find(question, k)]


def write(memory, question, feedback, **names):
    """Add an entry of any user."""
    memory.log.append([MemoryEntry(question=question, feedback=feedback, **names)])


class Own(EditLookup):
    """A look-up of a user's own."""


@pytest.mark.parametrize("name", [*sorted(LOOKUPS), f"{__name__}:Own"])
def test_every_look_up_keeps_the_contract(name, memory, encoder_dir):
    encoder = str(encoder_dir) if name in ("encoder", "paraphrase") else None
    args = LookupArguments(lookup=name, encoder=encoder).resolve()
    text = "the film is warm"
    lookup = load_lookup(args, CPU)(memory.log)
    assert lookup.find(text) == []
    write(memory, text, "one")
    write(memory, "the boats by the sea", "two")
    before = lookup.find(text, 5)
    assert [match.score for match in before] == sorted((m.score for m in before), reverse=True)
    assert lookup.find(text, 1) == before[:1]
    assert load_lookup(args, CPU)(memory.log).find(text, 5) == before
    # Of what is the same a user's own wins, and no other user is seen.
    for user, feedback in (("anna", "four"), ("", "five"), ("bert", "six")):
        write(memory, text, feedback, user=user)
    of_anna = load_lookup(args, CPU, "anna")(memory.log).find(text, 9)
    assert {match.feedback for match in of_anna} <= {"four", "five", "two"}
    assert {match.user for match in lookup.find(text, 9)} == {""}
    assert (before[0].feedback, of_anna[0].feedback) == ("one", "four")
    # What is erased is not found by who had found it before, and what is near it then is.
    memory.erase(next(e.id for e in memory if e.feedback == "five"))
    left = [match.feedback for match in lookup.find("the film is warm by the sea", 9)]
    assert left == ["two"]
    assert json.dumps(dict(lookup.fingerprint))


@pytest.mark.parametrize(
    ("lookup", "asked", "same"),
    [
        (RelativeEditLookup, "Where do I live?", " where do i  LIVE"),
        (EditLookup, "What is like < a > ?", "what, is like < b >"),  # a family's: slotless
    ],
)
def test_a_question_goes_in_all_its_spellings(lookup, asked, same, memory):
    with Memory(memory.path, lookup=lookup) as memory:
        memory.add("another thing", "stays")
        memory.add(asked, "the first")
        entry = memory.add(same, "the second")
        found = memory.search(asked, 9, threshold=-np.inf)
        assert [match.feedback for match in found] == ["the second", "stays"]
        memory.delete(entry.id)
        assert [entry.feedback for entry in memory] == ["stays"]
        memory.erase(entry.id)
        assert [event.feedback for event in memory.events()] == ["stays", ""]


def test_a_key_is_what_stands_around_the_slot():
    assert in_form("< pot >  Can be used, how?", "slotless") == "Can be used, how?"
    assert in_form("a > b < c", "slotless") == "a > b < c"  # no slot
    assert in_form("Find it in < p<i o/n>e! > ?", "slotless") == "Find it in ?"


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=5).map(" ".join)
LETTERS = {"encoder": EncoderLookup, "paraphrase": ParaphraseLookup}
CLASSES = {"edit": EditLookup, "relative-edit": RelativeEditLookup, **LETTERS}


def open_by(name, log):
    """Open a look-up of anna's."""
    encoder = [LetterEncoder()] if name in LETTERS else []
    return CLASSES[name](log, *encoder, "anna")


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(CLASSES)),
    changes=st.lists(st.tuples(WORDS, st.sampled_from(["", "anna"]), st.booleans()), max_size=12),
    question=WORDS,
    k=st.integers(1, 4),
)
def test_a_look_up_that_follows_is_one_made_anew(name, changes, question, k):
    """Whatever was added, deleted and erased between questions, to the last digit."""
    with Memory(":memory:") as memory:
        following = open_by(name, memory.log)
        for number, (key, user, is_added) in enumerate(changes):
            there = [e.id for e in memory if (e.question, e.user) == (key, user)]
            if is_added:
                write(memory, key, f"said {number}", user=user)
            elif there and number % 3 == 0:
                memory.erase(*there)
            else:
                memory.delete(*there)
            following.find(question, k)
        found = following.find(question, 99)
        assert found == open_by(name, memory.log).find(question, 99)
        assert following.find(question, k) == found[:k]
        order = [(-m.score, m.user == "", -m.id) for m in found]
        assert order == sorted(order)  # score, the user's own, newest first
        # The control: with a shared and an own entry of equal score, the other order is wrong.
        for user in ("anna", ""):
            write(memory, f"{question} {question}", "equal", user=user)
        (first,) = following.find(f"{question} {question}")
        assert (first.user, first.feedback) == ("anna", "equal")


def test_a_relative_distance_is_that_worked_out_by_hand(memory):
    memory.add("Why?", "reason")
    memory.add("what is C++", "language")
    lookup = RelativeEditLookup(memory.log)
    assert found(lookup, "why") == [("reason", 1.0)]
    assert found(lookup, "who") == [("reason", round(1 - 2 / 6, 3))]  # y goes, o comes
    assert found(lookup, "WHAT  is really c++?") == [("language", round(1 - 7 / 29, 3))]


@pytest.mark.parametrize(
    ("stored", "asked", "is_other"),
    [
        ("When do you close?", "When do you open?", True),
        ("How do I turn on the alarm?", "How do I turn off the alarm?", True),
        ("convert miles to kilometres", "convert kilometres to miles", True),
        ("Is this move legal in the game?", "Is this move illegal in the game?", True),
        ("When do you close?", "Please, when do you close?", False),
        ("How do I reset my password?", "how do I reset my  pasword", False),
    ],
)
def test_a_question_with_an_exchanged_word_is_another_one(stored, asked, is_other, memory):
    """For both look-ups of people's questions; the cosine alone takes it for the same."""
    memory.add(stored, "meant")
    log = memory.log
    for lookup in (RelativeEditLookup(log), ParaphraseLookup(log, LetterEncoder())):
        (match,) = lookup.find(asked)
        assert (match.score < lookup.scores.gate) == is_other, lookup
        assert lookup.find(stored)[0].score == 1
    (control,) = EncoderLookup(log, LetterEncoder()).find(asked)
    assert control.score > ParaphraseLookup.scores.gate


def test_vectors_are_made_once_and_leave_with_their_entries(memory):
    log = memory.log
    log.append(MemoryEntry(question=key, feedback=key) for key in ("ab", "cd", "ef"))
    one, other = LetterEncoder(), LetterEncoder("another")
    lookup = EncoderLookup(log, one)
    assert found(lookup, "cd") == [("cd", 1)]
    memory.add("gh", "gh")
    assert found(EncoderLookup(log, one), "gh") == [("gh", 1)]
    assert one.encoded == ["ab", "cd", "ef", "cd", "gh", "gh"]  # each key once, and the questions
    assert found(EncoderLookup(log, other), "cd") == [("cd", 1)]
    assert other.encoded == ["ab", "cd", "ef", "gh", "cd"]
    vectors = one.encode(["ab", "cd", "ef", "gh"])
    assert [stands_in(log.path, vector) for vector in vectors] == [True] * 4  # the control
    memory.update(2, "another")
    memory.delete(3)
    memory.erase(4)
    assert [stands_in(log.path, vector) for vector in vectors] == [True, False, False, False]
    assert found(lookup, "cd", 9) == [("another", 1), ("ab", 0)]
    # What leaves while it is encoded by another process gets no vector.
    log.keep_vectors("late", {2: vectors[1], 4: vectors[3]})
    assert not log.vectors("late", [2, 4])


def stands_in(path, vector):
    files = path.parent.glob(f"{path.name}*")
    return any(vector.tobytes() in file.read_bytes() for file in files)


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=10)
def test_a_damaged_vector_is_made_again_and_kept(place, bit, tmp_path_factory):
    keys, path = ["ab", "cd", "ef"], tmp_path_factory.mktemp("flip") / "m.sqlite"
    with Memory(path) as memory:
        memory.log.append(MemoryEntry(question=key, feedback=key) for key in keys)
        EncoderLookup(memory.log, LetterEncoder()).find("cd")
    vector, data = LetterEncoder().encode(["cd"]).tobytes(), bytearray(path.read_bytes())
    start = bytes(data).index(vector) - 8  # of the checksum
    data[start + int(place * (len(vector) + 8))] ^= 1 << bit
    path.write_bytes(data)
    encoder = LetterEncoder()
    for _ in range(2):
        with Memory(path) as memory:
            assert found(EncoderLookup(memory.log, encoder), "cd") == [("cd", 1)]
    assert encoder.encoded == ["cd", "cd", "cd"]  # made once, and the two questions


def test_an_encoder_is_the_look_ups_or_is_refused():
    args = LookupArguments(encoder="bundled:minilm-l6")
    assert args.resolve().lookup == "paraphrase"
    family = load_family("lexical")
    assert args.resolve(family, is_encoder_shared=True).lookup == "edit"  # it is KATE's too
    with pytest.raises(ConfigError, match="'edit'"):
        args.resolve(family)


@pytest.mark.parametrize(
    ("name", "lookup", "key_form", "gate"),
    [
        ("lexical", "edit", "slotless", -5),
        ("webquestions", "edit", "whole", None),
        ("own", "relative-edit", "whole", 0.8),
    ],
)
def test_the_papers_rule_is_for_the_papers_families(name, lookup, key_form, gate, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"prompt": "webquestions", "num_remembered": 8}))
    family = load_family(str(own) if name == "own" else name)
    args = LookupArguments().resolve(family)
    assert (args.lookup, args.key_form, args.threshold) == (lookup, key_form, gate)
    with pytest.raises(ConfigError, match="threshold is 5"):
        LookupArguments(threshold=5.0).resolve(family)  # a distance is no score
