"""What counts as a word, a mark and an equal text, in any script."""

import re
import string
import unicodedata
from functools import cache
from itertools import pairwise

import regex

LEAK_JACCARD = 0.9  # share of common words from which a text is nearly the query's own


# For fingerprints: how `split_words` cuts.
WORDS = "NFC, case-folded; letters, digits and their marks; pairs of characters without spaces"

_WIDE = re.compile("[\uff01-\uffee]+")  # full-width Latin, half-width Kana
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\p{Cf}]+")
_NO_SPACES = (
    r"[[\p{Han}\p{Bopomofo}\p{scx=Hira}\p{scx=Kana}\p{Yi}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    r"\p{Tibetan}\p{Javanese}\p{Balinese}\p{Tai_Le}\p{New_Tai_Lue}\p{Tai_Tham}\p{Tai_Viet}]"
    r"&&[\p{L}\p{N}]]"
)
_WORD = regex.compile(r"[\p{L}\p{N}][\p{L}\p{N}\p{M}]*")
_ASCII_WORD = re.compile("[a-z0-9]+")
_RUN = regex.compile(rf"((?:{_NO_SPACES}\p{{M}}*)+)", regex.VERSION1)
_CHARACTER = regex.compile(r"\P{M}\p{M}*")
_PUNCTUATION = regex.compile(r"[\p{P}$+<=>^`|~]")
_NUMBER = re.compile(r"-?\.?\d")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NAMING_MARKS = "#%&@"  # part of what they stand beside: C#, 5%
_SIGNS = (  # that change what a text says, written as one symbol
    (re.compile(r"(?<!\w)-(?=\.?\d)"), "\N{MINUS SIGN}"),
    (re.compile(r"[:;=]-?\)"), "\N{SLIGHTLY SMILING FACE}"),
    (re.compile(r"[:;=]-?\("), "\N{SLIGHTLY FROWNING FACE}"),
)


def copy_key(text: str) -> str:
    """Return a text as copies are compared: without case, extra spaces and variants of coding."""
    folded = unicodedata.normalize("NFC", text).casefold().replace("i\u0307", "i")  # Turkish İ
    narrow = _WIDE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), folded)
    return " ".join(unicodedata.normalize("NFC", narrow).split())


@cache
def _mark(char: str) -> str:
    """Return what counts of a character: a word's own, a word by itself, or a space."""
    kind = unicodedata.category(char)
    if kind[0] in "LMN":
        return char
    return f" {char} " if kind in ("Sc", "Sm", "So") or char in "#%" else " "


def text_key(text: str) -> str:
    """Return a text's words without case and punctuation.

    Symbols count, "#", "%", a minus sign and smileys among them: C++ is not C#.
    """
    folded = copy_key(text)
    words = folded
    for pattern, sign in _SIGNS:
        words = pattern.sub(sign, words)
    # Of a text without words its marks must count, or "?!" would be the same as "...".
    return " ".join("".join(map(_mark, words)).split()) or folded


def split_words(text: str, *, singles: bool = False) -> list[str]:
    """Split a text into words: case-folded runs of letters and digits with their marks.

    Scripts without spaces between words (Chinese, Japanese, Thai, ...) are cut into pairs of
    neighboring characters, and a lone character is a word. With `singles` each of their characters
    is a word too: searched texts need that, so that a query of one character finds them.
    """
    if text.isascii():  # the same, and much faster
        return _ASCII_WORD.findall(text.lower())
    words: list[str] = []
    seen = _UNSEEN.sub("", copy_key(text.replace("\u200b", " ")))
    for word in _WORD.findall(seen):
        if word.isascii():
            words.append(word)
            continue
        # Every second part is a run without spaces, those between are words or empty.
        for number, piece in enumerate(_RUN.split(word)):
            if number % 2 == 0:
                words += [piece] if piece else []
                continue
            characters = _CHARACTER.findall(piece)
            if singles or len(characters) == 1:
                words += characters
            words += map("".join, pairwise(characters))
    return words


def drop_punctuation(text: str) -> str:
    """Return a text without punctuation of any script, and without ASCII's symbols."""
    return " ".join(_PUNCTUATION.sub("", text).split())


def strip_marks(text: str) -> str:
    """Strip spaces and punctuation of any script.

    What belongs to a name or number stays (C#, 5%, -5), and so does a text of marks alone.
    """
    start = 0
    end = len(text)
    while start < end and _is_mark(text[end - 1]):
        end -= 1
    while start < end and _is_mark(text[start]) and not _NUMBER.match(text, start):
        start += 1
    return text[start:end] or text.strip()


def normalize_answer(text: str) -> str:
    """Lower-case, then drop ASCII punctuation, English articles and extra spaces.

    As SQuAD (Rajpurkar et al. 2016, section 6.1), DPR and KATE (Liu et al. 2022, section 3.1).
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def word_key(text: str) -> str:
    """Return a label's word, or an answer, as the two are compared: marks around it do not count.

    "Yes.", "「yes」" and "YES" are one, C++ and C# are two, and an article is a word.
    """
    return strip_marks(_UNSEEN.sub("", copy_key(text)))


def _is_mark(char: str) -> bool:
    kind = unicodedata.category(char)
    return char == "`" or ((kind[0] in "PZ" or kind in ("Cc", "Cf")) and char not in _NAMING_MARKS)
