"""The chance of a given word, of a prompt that an endpoint echoes with its tokens' chances.

The word is found from the end of the prompt: servers differ in what stands at its beginning (a
special token or none, and so other offsets), and in how they spell tokens of other scripts.
"""

import math

from pgra.errors import ModelError
from pgra.icl.endpoint import Reply

_INSTEAD = "use --decide_by generation"


def word_chance(reply: Reply, prompt: str, word: str) -> float:
    """Give the log-probability of all tokens of a word after a prompt.

    Args:
        reply: To `prompt` and `word`, echoed, with one token more.
        prompt: What stands before the word.
        word: With its space.

    Raises:
        ModelError: If the prompt was not echoed, has no chances, or the tokens do not begin a new
            one where the word begins.
    """
    if not reply.text.startswith(prompt + word):
        raise ModelError(f"does not echo a prompt, so it cannot score given words: {_INSTEAD}")
    if not reply.chances or len(reply.chances) != len(reply.tokens):
        raise ModelError(f"gives no log-probabilities of a prompt's tokens: {_INSTEAD}")
    for end in _ends(reply):
        start = _find_start(reply.tokens, word, end)
        if start is not None:
            return _add(reply.chances[start:end], word)
    raise ModelError(f"joins '{word}' to the prompt before it, or spells it otherwise: {_INSTEAD}")


def _ends(reply: Reply) -> list[int]:
    """Give where the prompt's tokens may end: before what was written, or where all do."""
    total = len(reply.tokens)
    written = 1 if reply.num_new_tokens is None else reply.num_new_tokens
    return [end for end in dict.fromkeys((total - written, total)) if end > 0]


def _find_start(tokens: tuple[str, ...], word: str, end: int) -> int | None:
    """Give the first token of a word that ends before `end`; None where none begins with it.

    SentencePiece's tokens are told without their space, so a word may lack it.
    """
    bare, tail = word.lstrip(), ""
    for start in range(end - 1, -1, -1):
        tail = tokens[start] + tail
        has_space_before = start > 0 and tokens[start - 1] + tail == word
        if tail == word or (tail == bare and not has_space_before):
            return start
        if len(tail) > len(word):
            return None
    return None


def _add(chances: tuple[float | None, ...], word: str) -> float:
    total = sum(math.nan if chance is None else chance for chance in chances)
    if not math.isfinite(total):
        raise ModelError(f"gives '{word}' no finite log-probability: {_INSTEAD}")
    return total
