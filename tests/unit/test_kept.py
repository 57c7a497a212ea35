"""A local LM's answers are kept: none is asked twice, and a stop loses one batch at the most.

Several processes ask each prompt once among them; here they are threads, each with its own LM.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from pgra.core import Context, Worker
from pgra.errors import ArtifactError
from pgra.lm.cache import AnswersCache, KeptCompleter
from pgra.lm.completion import Completion

PROMPTS = [f"prompt {i}" for i in range(100)]


class Counted:
    """Answers by arithmetic, counts what it is asked, and may die."""

    def __init__(self, name="one", *, dies_after=1000):
        self.window, self.fingerprint, self.asked = 50, {"lm": name}, []
        self._dies_after = dies_after

    def count_tokens(self, texts):
        return [len(text) for text in texts]

    def _take(self, prompts):
        if len(self.asked) + len(prompts) > self._dies_after:
            raise KeyboardInterrupt
        self.asked += prompts

    def complete(self, prompts, *, max_new_tokens, stop, advance=None):
        self._take(prompts)
        return [Completion(f"{p}{stop}{max_new_tokens}", len(p), 3) for p in prompts]

    def score(self, prompts, words, *, advance=None):
        self._take(prompts)
        return [[-float(len(p) + len(w)) for w in words] for p in prompts]


@pytest.fixture
def answers(tmp_path):
    return AnswersCache(tmp_path / "answers")


def test_answers_come_in_order_and_equal_prompts_are_asked_once(answers):
    lm = Counted()
    kept = KeptCompleter(lm, answers)
    assert kept.score(["bb", "a", "bb"], [" x", " yy"]) == [[-4, -5], [-3, -4], [-4, -5]]
    assert lm.asked == ["bb", "a"]
    assert (kept.window, kept.count_tokens(["abc"])) == (50, [3])


def test_what_was_answered_before_a_stop_is_not_asked_again(answers):
    dying = Counted(dies_after=99)
    with pytest.raises(KeyboardInterrupt):
        KeptCompleter(dying, answers).score(PROMPTS, [" x"])
    assert 0 < len(dying.asked) < 100
    after, told = Counted(), []
    found = KeptCompleter(after, answers).score(PROMPTS, [" x"], advance=told.append)
    assert after.asked == PROMPTS[len(dying.asked) :]
    assert told == [len(dying.asked)]
    assert found == Counted().score(PROMPTS, [" x"])


def test_another_word_lm_or_parameter_is_asked(answers):
    lm = Counted()
    kept = KeptCompleter(lm, answers)
    kept.score(["a"], [" x"])
    kept.score(["a"], [" x", " y"])
    first = kept.complete(["a"], max_new_tokens=3, stop="!")
    assert kept.complete(["a"], max_new_tokens=4, stop="!")[0].text == "a!4"
    assert kept.complete(["a"], max_new_tokens=3, stop="!") == first == [Completion("a!3", 1, 3)]
    assert len(lm.asked) == 4
    assert (kept.num_asked, kept.num_found) == (4, 1)
    other = Counted("two")
    KeptCompleter(other, answers).score(["a"], [" x"])
    assert other.asked == ["a"]


def all_ask(lms, caches, prompts=PROMPTS, told=None):
    barrier = Barrier(len(lms), timeout=20)

    def ask(rank):
        context = Context(Worker(rank, len(lms)), barrier.wait)
        advance = told.append if told is not None and rank == 0 else None
        return KeptCompleter(lms[rank], caches[rank], context).score(
            prompts, [" x", " yy"], advance=advance
        )

    with ThreadPoolExecutor(len(lms)) as pool:
        return list(pool.map(ask, range(len(lms))))


def test_processes_share_the_prompts_out_and_all_get_all_answers(answers):
    KeptCompleter(Counted(), answers).score(PROMPTS[:7], [" x", " yy"])
    lms, told = [Counted(), Counted(), Counted()], []
    found = all_ask(lms, [answers] * 3, [*PROMPTS, *PROMPTS[:9]], told)
    assert [len(lm.asked) for lm in lms] == [31, 31, 31]
    assert sorted(prompt for lm in lms for prompt in lm.asked) == sorted(PROMPTS[7:])
    assert found == [Counted().score([*PROMPTS, *PROMPTS[:9]], [" x", " yy"])] * 3
    assert told == [7]  # of what was there; this LM tells of none


def test_the_bar_of_several_processes_ends_at_all_prompts(answers):
    class Telling(Counted):
        def score(self, prompts, words, *, advance=None):
            for _ in prompts if advance else ():
                advance(1)
            return super().score(prompts, words)

    told = []
    all_ask([Telling(), Telling(), Telling()], [answers] * 3, told=told)
    assert told == [0, *[3] * 33, 1]


def test_processes_that_do_not_see_one_folder_are_told(tmp_path):
    caches = [AnswersCache(tmp_path / name) for name in ("one", "two")]
    with pytest.raises(ArtifactError, match="lacks 100 answers that other processes were given"):
        all_ask([Counted(), Counted()], caches)
