"""A local LM's answers are kept: none is asked twice, and a stop loses one batch at the most."""

import pytest

from pgra.icl.answers_cache import AnswersCache
from pgra.icl.completion import Completion
from pgra.icl.kept import KeptCompleter

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
