"""The chance of a word is the sum over its tokens, wherever a server's prompt begins."""

import pytest

from pgra.errors import ModelError
from pgra.lm.remote import Reply, word_chance

PROMPT, WORD = "It was", " great fun"
TOKENS = ("It", " was", " great", " fun", ".")  # the last one is written
CHANCES = (None, -1.0, -0.5, -0.25, -4.0)


def reply(tokens=TOKENS, chances=CHANCES, *, text=f"{PROMPT}{WORD}.", num_new=1):
    return Reply(text, len(tokens) - 1, num_new, tuple(tokens), tuple(chances))


def test_only_the_words_tokens_count():
    assert word_chance(reply(), PROMPT, WORD) == -0.75
    assert word_chance(reply(), "It was great", " fun") == -0.25  # the control


def test_a_special_token_before_the_prompt_changes_nothing():
    told = reply(("<s>", *TOKENS), (None, -9.0, *CHANCES[1:]))
    assert word_chance(told, PROMPT, WORD) == -0.75


@pytest.mark.parametrize("num_new", [None, 1])
def test_what_was_written_is_left_out(num_new):
    again = reply((*TOKENS[:-1], " fun"), CHANCES, text=f"{PROMPT}{WORD} fun", num_new=num_new)
    assert word_chance(again, PROMPT, WORD) == -0.75


def test_a_server_that_counts_a_token_it_does_not_show_is_understood():
    hidden = reply(TOKENS[:-1], CHANCES[:-1], text=f"{PROMPT}{WORD}")
    assert word_chance(hidden, PROMPT, WORD) == -0.75


def test_tokens_without_their_space_are_known():
    assert word_chance(reply(("It", "was", "great", " fun", ".")), PROMPT, WORD) == -0.75
    apart = reply(("It", " was", " ", "great", "."), (None, -1.0, -0.5, -0.25, -4.0))
    assert (
        word_chance(reply(apart.tokens, apart.chances, text="It was great."), PROMPT, " great")
        == -0.75
    )


def test_a_prompt_in_another_script_does_not_matter():
    told = reply(("bytes:\\xe6", "\ufffd", " great", " fun", "."), text="海 great fun.")
    assert word_chance(told, "海", WORD) == -0.75


def test_what_cannot_be_scored_is_refused_with_the_way_out():
    instead = "use --decide_by generation$"
    with pytest.raises(ModelError, match=f"^does not echo a prompt.*{instead}"):
        word_chance(reply(text=" ."), PROMPT, WORD)
    with pytest.raises(ModelError, match=f"^gives no log-probabilities.*{instead}"):
        word_chance(reply((), ()), PROMPT, WORD)
    with pytest.raises(ModelError, match=f"^gives no log-probabilities.*{instead}"):
        word_chance(reply(TOKENS, CHANCES[1:]), PROMPT, WORD)
    with pytest.raises(ModelError, match=f"^joins ' great fun' to the prompt.*{instead}"):
        word_chance(reply(("It", " was great", " fun", "."), CHANCES[1:]), PROMPT, WORD)
    with pytest.raises(ModelError, match=f"^gives ' great fun' no finite.*{instead}"):
        word_chance(reply(chances=(None, -1.0, None, -0.2, -4.0)), PROMPT, WORD)
