"""Answers outlive their process, are shared by several, and are never half written or asked twice.

Several processes ask each prompt once among them; here they are threads, each with its own LM.
"""

import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgra.context import Context
from pgra.lm.base import Completion
from pgra.lm.cache import AnswersCache, CachedLM
from pgra.parallel import Worker

PARIS = Completion(" Paris", 12, 2)
PROMPTS = [f"prompt {i}" for i in range(100)]


@pytest.fixture
def answers(tmp_path):
    return AnswersCache(tmp_path / "answers")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 6), column=st.integers(0, 1))
def test_no_flipped_bit_changes_an_answer(place, bit, column, tmp_path_factory):
    answers = AnswersCache(tmp_path_factory.mktemp("flip"))
    kept = {f"key {i}": Completion("", 12, 1, -20.1 - i) for i in range(4)}
    answers.keep(kept, model="m")
    assert answers.find(list(kept)) == kept  # the control
    name = ("answer", "digest")[column]
    with contextlib.closing(sqlite3.connect(answers.path, isolation_level=None)) as db:
        ((old,),) = db.execute(f"SELECT {name} FROM answers WHERE digest = 'key 2'")
        at = int(place * len(old))
        new = old[:at] + chr(ord(old[at]) ^ 1 << bit) + old[at + 1 :]
        db.execute(f"UPDATE OR REPLACE answers SET {name} = ? WHERE digest = 'key 2'", [new])
    left = answers.find(list(kept))
    assert left == {key: kept[key] for key in left}
    assert "key 2" not in left
    answers.keep({"key 2": PARIS}, model="m")  # what is lost is asked again
    assert answers.find(["key 2"]) == {"key 2": PARIS}


# A local LM whose answers are kept.


class Counted:
    """Answers by arithmetic, counts what it is asked, and may die."""

    def __init__(self, name="one", *, dies_after=1000):
        self.window, self.fingerprint, self.asked = 50, {"lm": name}, []
        self._dies_after = dies_after

    def _take(self, prompts):
        if len(self.asked) + len(prompts) > self._dies_after:
            raise KeyboardInterrupt
        self.asked += prompts

    def count_tokens(self, texts):
        return [len(text) for text in texts]

    def complete(self, prompts, *, max_new_tokens, stop, advance):
        self._take(prompts)
        return [Completion(f"{p}{stop}{max_new_tokens}", len(p), 3) for p in prompts]

    def score(self, prompts, words, *, advance=int):
        self._take(prompts)
        for _ in prompts:
            advance(1)
        return [[-float(len(p) + len(w)) for w in words] for p in prompts]


def test_what_was_answered_before_a_stop_is_not_asked_again(answers, monkeypatch):
    monkeypatch.setattr("pgra.lm.cache.PORTION", 32)
    dying = Counted(dies_after=99)
    with pytest.raises(KeyboardInterrupt):
        CachedLM(dying, answers).score(PROMPTS, [" x"])
    assert 0 < len(dying.asked) < 100
    after, told = Counted(), []
    found = CachedLM(after, answers).score(PROMPTS, [" x"], advance=told.append)
    assert after.asked == PROMPTS[len(dying.asked) :]
    assert told == [len(dying.asked), *[1] * len(after.asked)]
    assert found == Counted().score(PROMPTS, [" x"])


def test_another_word_lm_or_parameter_is_asked_and_equal_prompts_once(answers):
    lm = Counted()
    kept = CachedLM(lm, answers)
    assert kept.score(["bb", "a", "bb"], [" x"]) == [[-4], [-3], [-4]]
    kept.score(["a"], [" x", " y"])
    first = kept.complete(["a"], max_new_tokens=3, stop="!")
    assert kept.complete(["a"], max_new_tokens=4, stop="!")[0].text == "a!4"
    assert kept.complete(["a"], max_new_tokens=3, stop="!") == first == [Completion("a!3", 1, 3)]
    assert lm.asked == ["bb", "a", "a", "a", "a"]
    other = Counted("two")
    CachedLM(other, answers).score(["a"], [" x"])
    assert other.asked == ["a"]


def all_ask(lms, caches, prompts, told):
    meeting = Barrier(len(lms), timeout=60)

    def ask(rank):
        context = Context(Worker(rank, len(lms)), meeting.wait)
        advance = int if rank else told.append
        return CachedLM(lms[rank], caches[rank], context).score(
            prompts, [" x", " yy"], advance=advance
        )

    with ThreadPoolExecutor(len(lms)) as pool:
        return list(pool.map(ask, range(len(lms))))


def test_processes_share_the_prompts_out_and_all_get_all_answers(answers):
    CachedLM(Counted(), answers).score(PROMPTS[:7], [" x", " yy"])
    lms, told = [Counted(), Counted(), Counted()], []
    found = all_ask(lms, [answers] * 3, [*PROMPTS, *PROMPTS[:9]], told)
    assert [len(lm.asked) for lm in lms] == [31, 31, 31]
    assert sorted(prompt for lm in lms for prompt in lm.asked) == sorted(PROMPTS[7:])
    assert found == [Counted().score([*PROMPTS, *PROMPTS[:9]], [" x", " yy"])] * 3
    assert told == [7, *[1] * 31, 62]  # of what was there, its own, and the others'
