"""Look-ups, their vectors, and the gate."""

import json

import numpy as np
import pytest

from pgra.config import config_root
from pgra.errors import ConfigError, DataError
from pgra.memory.families import family_names, load_family
from pgra.memory.log import Event, FeedbackLog
from pgra.memory.lookup import (
    Bm25Lookup,
    Collision,
    EditLookup,
    EncoderLookup,
    KeyEncoder,
    LookupArguments,
    Match,
    RelativeEditLookup,
    Trial,
    choose_threshold,
    find_collisions,
    judge_threshold,
    lookup_opener,
    normalize_key,
    pass_gate,
    strip_slot,
    try_lookup,
)
from pgra.memory.vectors import KeyVectors


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
    return [(one.entry.feedback, round(one.score, 3)) for one in lookup.find(question, k)]


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
    keys, kinds = [way.question for way in ways], [way.kind for way in ways]
    across = find_collisions(keys, kinds)
    all_pairs = find_collisions(keys, [way.id for way in ways])
    assert (len(across), len(all_pairs) - len(across)) == COLLISIONS[name]
    if name == "lexical":
        (pair,) = across
        assert [keys[pair.first], keys[pair.second]] == [
            "What is like < {word} > ?",
            "What is unlike < {word} > ?",
        ]
        assert pair.distance == 2


def test_one_key_with_two_meanings_collides_with_itself():
    keys, meanings = ["is < a > ?", "is < b >", "is < c >"], ["x", "y", "x"]
    assert find_collisions(keys, meanings) == [Collision(1, 2, 0)]
    assert find_collisions(keys, ["x", "x", "x"]) == []  # the control


def test_edit_distance_finds_the_nearest_key_and_its_newest_feedback(log):
    lookup = EditLookup(log)
    assert lookup.find("anything") == []
    log.write("What is like < good > ?", "old")
    log.write("What is like < bad > ?", "new")
    log.write("zzzz < x > ?", "far")
    assert found(lookup, "what is unlike < y >", 3) == [("new", -2.0), ("far", -14.0)]
    log.correct(2, "newer")
    assert found(lookup, "what is like < y >") == [("newer", 0.0)]
    log.forget(4)
    assert found(lookup, "what is like < y >") == [("old", 0.0)]  # the other question's came back
    log.forget(1)
    assert found(lookup, "what is like < y >", 3) == [("far", -12.0)]


def test_of_equally_near_keys_the_first_written_counts_as_in_the_release(log):
    log.write("abcdef", "first")
    log.write("abcdxy", "second")
    log.write("abcdef", "first again")  # rewritten: it keeps its place
    assert found(EditLookup(log), "abcdez") == [("first again", -1.0)]
    log.write("abcxyz", "third")
    assert found(EditLookup(log), "abcdxf")[0] == ("first again", -1.0)


def test_a_limit_changes_no_match_within_it(log):
    for i, key in enumerate(("aaaa", "aaaabb", "cccccccccccc")):
        log.write(key, str(i))
    near, wide = EditLookup(log, max_distance=2), EditLookup(log)
    assert found(near, "aaaab", 5) == found(wide, "aaaab", 5)[:2] == [("0", -1.0), ("1", -1.0)]
    assert len(found(wide, "aaaab", 5)) == 3


def test_the_encoder_finds_by_cosine_and_of_equals_the_newest(log, tmp_path):
    lookup = EncoderLookup(log, KeyVectors(tmp_path / "v", LetterEncoder()))
    assert lookup.find("abc") == []
    log.write("ab", "first")
    log.write("aabb", "second")  # the same direction
    log.write("cd", "third")
    assert found(lookup, "ab", 3) == [("second", 1.0), ("first", 1.0), ("third", 0.0)]


def test_a_rewritten_key_gives_its_last_feedback_and_no_others(log, tmp_path):
    """The release's semantic memory gave the next key's feedback, or failed, after a rewrite."""
    lookup = EncoderLookup(log, KeyVectors(tmp_path / "v", LetterEncoder()))
    for key, feedback in (("ab", "one"), ("ab", "two"), ("cd", "three"), ("ef", "four")):
        log.write(key, feedback)
    assert found(lookup, "ef") == [("four", 1.0)]
    assert found(lookup, "cd") == [("three", 1.0)]
    assert found(lookup, "ab") == [("two", 1.0)]
    assert len(lookup.find("ab", 9)) == 3


def test_what_is_forgotten_or_of_another_task_is_looked_past(log, tmp_path):
    vectors = KeyVectors(tmp_path / "v", LetterEncoder())
    ids = [log.write("ab" * (i + 1), f"no {i}", task="other").id for i in range(20)]
    log.write("abc", "yes")
    assert found(EncoderLookup(log, vectors), "ab", 2) == [("yes", 0.816)]
    for entry_id in ids[:19]:
        log.forget(entry_id)
    assert found(EncoderLookup(log, vectors, task="other"), "ab") == [("no 19", 1.0)]


def test_vectors_follow_the_log_and_are_not_made_twice(log, tmp_path):
    encoder = LetterEncoder()
    log.write("ab", "one")
    assert KeyVectors(tmp_path / "v", encoder).follow(log) == 1
    log.write("cd", "two")
    log.forget(log.write("ef", "three").id)
    again = KeyVectors(tmp_path / "v", encoder)
    assert (again.follow(log), again.follow(log), len(again)) == (1, 0, 2)
    assert encoder.num_texts == 2


def open_with(log, folder, encoder=None, **more):
    vectors = KeyVectors(folder, encoder or LetterEncoder(), **more)
    count = vectors.follow(log)
    return vectors, count


def damage_state(folder):
    (folder / "state.json").write_text("{")


def cut_vectors(folder):
    path = folder / "vectors.f16"
    path.write_bytes(path.read_bytes()[:-1])


def remove_ids(folder):
    (folder / "ids.i64").unlink()


@pytest.mark.parametrize("harm", [damage_state, cut_vectors, remove_ids])
def test_torn_vectors_are_made_again_from_the_log(log, tmp_path, caplog, harm):
    for key in ("ab", "cd", "ef"):
        log.write(key, key)
    open_with(log, tmp_path / "v")
    harm(tmp_path / "v")
    vectors, count = open_with(log, tmp_path / "v")
    assert count == 3
    assert "is not what its log says: made again from it" in caplog.text
    assert vectors.search("cd", 1).ids == [2]


def test_vectors_of_another_encoder_or_another_log_are_made_again(log, tmp_path):
    log.write("ab", "one")
    log.write("cd", "two")
    folder = tmp_path / "v"
    assert [open_with(log, folder)[1] for _ in "12"] == [2, 0]
    assert open_with(log, folder, LetterEncoder("another"))[1] == 2
    with FeedbackLog.open(tmp_path / "other.sqlite") as other:
        other.write("xy", "one")
        other.write("zz", "two")
        vectors, count = open_with(other, folder, LetterEncoder("another"))
    assert count == 2
    assert vectors.search("xy", 1).ids == [1]


def test_what_a_killed_job_left_behind_the_rows_is_written_over(log, tmp_path):
    log.write("ab", "one")
    open_with(log, tmp_path / "v")
    for name in ("vectors.f16", "ids.i64"):
        with (tmp_path / "v" / name).open("ab") as file:
            file.write(b"\1" * 13)
    log.write("cd", "two")
    vectors, count = open_with(log, tmp_path / "v")
    assert (count, vectors.search("cd", 2).ids) == (1, [2, 1])
    assert (tmp_path / "v" / "ids.i64").stat().st_size == 16


def test_an_index_and_the_tail_behind_it_give_what_exact_search_gives(log, tmp_path):
    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    keys = ["".join(draw.choice(letters, 30)) for _ in range(300)]
    for key in keys[:280]:
        log.write(key, key)
    exact, _ = open_with(log, tmp_path / "exact")
    indexed, _ = open_with(log, tmp_path / "indexed", index_rows=100)
    assert (tmp_path / "indexed" / "index-280.faiss").exists()
    assert not list((tmp_path / "exact").glob("*.faiss"))
    for key in keys[280:]:
        log.write(key, key)
    assert exact.follow(log) == indexed.follow(log) == 20
    same = 0
    for key in keys[::10]:
        mine, theirs = indexed.search(key, 1), exact.search(key, 1)
        assert theirs.scores[0] == pytest.approx(1.0, abs=1e-3)
        same += mine.ids == theirs.ids
    assert same >= 28  # of 30; an index of lists may miss one
    deep, wide = indexed.search(keys[0], 200), exact.search(keys[0], 200)
    assert deep.ids == wide.ids  # so many are compared one by one
    again, count = open_with(log, tmp_path / "indexed", index_rows=100)
    assert count == 0
    assert again.search(keys[295], 1).ids == [296]


def test_a_real_encoders_vectors_lie_beside_the_memory(log, encoder_dir):
    args = LookupArguments(lookup="encoder", encoder=str(encoder_dir), key_form="slotless")
    lookup = lookup_opener(args, device="cpu")(log)
    log.write("The film is < warm > and funny", "a synonym")
    ((feedback, score),) = found(lookup, "The film is < dull > and funny")
    assert (feedback, score) == ("a synonym", 1.0)
    (folder,) = log.path.with_name("memory.sqlite.vectors").iterdir()
    assert folder.name.startswith(encoder_dir.name)
    whole = KeyEncoder(str(encoder_dir), "whole", device="cpu")
    one, other = whole.encode(["The film is < warm >", "The film is < dull >"])
    assert one @ other < 0.9999  # the control: the word counts where it is read
    assert whole.query_fingerprint["key_form"] == "whole"


def test_bm25_finds_shared_words_also_in_a_memory_of_one(log):
    lookup = Bm25Lookup(log)
    assert lookup.find("what rhymes with < x >") == []
    log.write("what rhymes with < x >", "a homonym")
    assert found(lookup, "which word rhymes")[0][0] == "a homonym"
    assert lookup.find("nothing shared") == []
    log.write("what rhymes < y >", "newer", task="other")
    assert len(lookup.find("rhymes", 5)) == 1


def test_look_ups_say_what_they_depend_on(log, tmp_path):
    vectors = KeyVectors(tmp_path / "v", LetterEncoder())
    kinds = [EditLookup(log), Bm25Lookup(log), EncoderLookup(log, vectors)]
    assert [one.fingerprint["lookup"] for one in kinds] == ["edit", "bm25", "encoder"]
    assert kinds[2].fingerprint["encoder"] == "letters"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lookup": "edti"}, "unknown lookup 'edti'. Did you mean 'edit'"),
        ({"key_form": "half"}, "unknown key_form 'half'"),
        ({"lookup": "gud-ir"}, "name it with --generator FOLDER"),
        ({"generator": "folder"}, "and for no other look-up"),
        ({"feedback_by": "bm25"}, "unknown feedback_by 'bm25'"),
        ({"lookup": "edit", "threshold": 5.0}, "an edit distance counts below 0: give -5"),
        ({"lookup": "encoder", "threshold": 3.0}, "a cosine is from -1 to 1"),
        ({"lookup": "relative-edit", "threshold": -5.0}, "is from 0 to 1, which is the same"),
        ({"lookup": "bm25", "threshold": -1.0}, "BM25's scores are above 0"),
        ({"threshold": float("nan")}, "threshold is nan: give a number that a score can reach"),
        ({"lookup": "bm25", "threshold": float("inf")}, "threshold is inf: give a number"),
        ({"lookup": "edit", "threshold": float("-inf")}, "threshold is -inf: give a number"),
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


@pytest.mark.parametrize("name", [*family_names(), *OWN_FAMILIES])
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
    log.forget(1)
    assert "reason" not in [feedback for feedback, _ in found(lookup, "why", 9)]
    assert lookup.fingerprint != EditLookup(log).fingerprint


def match(score):
    return Match(Event(1, "key", "feedback", "", "", ""), score)


def test_the_gate_lets_the_nearest_through_if_it_is_near_enough():
    matches = [match(-5.0), match(-6.0)]
    assert pass_gate(matches, -5.0) is matches[0]
    assert pass_gate(matches, -4.9) is None
    assert pass_gate([], -5.0) is None


TRIALS = [
    Trial(None, is_right=False, has_right=False),
    Trial(0.9, is_right=True, has_right=True),
    Trial(0.8, is_right=True, has_right=True),
    Trial(0.7, is_right=False, has_right=True),
    Trial(0.6, is_right=False, has_right=False),
    Trial(0.5, is_right=True, has_right=True),
]


def test_precision_and_recall_of_a_gate_are_those_worked_out_by_hand():
    report = judge_threshold(TRIALS, 0.65)
    assert (report.precision, report.recall, report.num_passed) == (2 / 3, 2 / 4, 3)
    assert judge_threshold(TRIALS, 2.0).precision is None


def test_the_threshold_with_the_largest_f1_is_chosen():
    # F1: 0.9 -> 0.4, 0.8 -> 2/3, 0.7 -> 4/7, 0.6 -> 1/2, 0.5 -> 2/3: the strictest of the two.
    assert choose_threshold(TRIALS).threshold == 0.8
    with pytest.raises(DataError, match="no threshold can be chosen from 1 questions"):
        choose_threshold(TRIALS[:1])


def test_a_dev_stream_looks_only_among_the_questions_before(log):
    questions = ["what is like < a >", "what is like < b >", "what is unlike < c >"]
    trials = try_lookup(log, EditLookup(log), questions, ["syn", "syn", "ant"])
    assert trials == [
        Trial(None, is_right=False, has_right=False),
        Trial(0.0, is_right=True, has_right=True),
        Trial(-2.0, is_right=False, has_right=False),
    ]
    assert choose_threshold(trials).threshold == 0.0
    with pytest.raises(ValueError, match="is not empty"):
        try_lookup(log, EditLookup(log), [], [])


def test_the_state_file_is_written_last(log, tmp_path):
    log.write("ab", "one")
    open_with(log, tmp_path / "v")
    state = json.loads((tmp_path / "v" / "state.json").read_text())
    assert (state["rows"], state["through"], state["indexed"]) == (1, 1, 0)
