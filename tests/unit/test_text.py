"""What a word, a mark and an equal text is, in any script; all who compare texts agree."""
# ruff: noqa: RUF001

import unicodedata

import pytest

from pgra.data.text import copy_key, drop_punctuation, split_words, strip_marks, text_key
from pgra.memory.lookup import EditLookup, RelativeEditLookup
from pgra.memory.memory import Memory
from pgra.retrieval.bm25 import BM25Retriever

# A text, a query that finds it, and one that does not though it shares letters with it.
SCRIPTS = {
    "Latin": ("Le café est fermé le dimanche.", "CAFÉ", "caf"),
    "Cyrillic": ("Мой кот любит молоко.", "МОЙ", "мои"),  # й is и with a mark
    "Greek": ("Ο δρόμος είναι μακρύς.", "ΜΑΚΡΎΣ", "μακρ"),
    "Hebrew": ("שָׁלוֹם לכולם", "שָׁלוֹם", "של"),
    "Persian": ("من کتاب می‌خواهم", "می‌خواهم", "خواهم"),  # a ZWNJ inside
    "Hindi": ("कल बारिश होगी।", "कल", "कला"),
    "Chinese": ("今天天气很好，我们去公园散步。", "公园散步", "园公步散"),
    "Chinese, one character": ("我有一只猫。", "猫", "狗"),
    "Japanese": ("新しいコンピューターを買った。", "ｺﾝﾋﾟｭｰﾀｰ", "タンコ"),
    "Korean": ("오늘 날씨가 좋다", "날씨가", "날씨"),
    "Thai": ("วันนี้อากาศดีมาก", "อากาศ", "กดน"),
    "Myanmar": ("ကျွန်တော်မြန်မာစာဖတ်တယ်", "မြန်မာ", "စာမာ"),
}
WORDS = {  # worked by hand: spaces part words, and pairs of characters where there are none
    "Straße, café!": ["strasse", "café"],
    "Мой КОТ": ["мой", "кот"],
    "ΟΔΌΣ·": ["οδόσ"],
    "שָׁלוֹם": ["שָׁלוֹם"],
    "می‌خواهم": ["میخواهم"],
    "कल बारिश।": ["कल", "बारिश"],
    "我有猫。猫": ["我有", "有猫", "猫"],
    "カタカ ひら": ["カタ", "タカ", "ひら"],
    "오늘 날씨": ["오늘", "날씨"],
    "อากาศ": ["อา", "าก", "กา", "าศ"],
    "ນ້ຳໃຈ": ["ນ້ຳ", "ຳໃ", "ໃຈ"],
    "ខ្មែរ": ["ខ្មែ", "មែរ"],
    "မြန်": ["မြန်"],
}
OTHERS = ["red stone", "blue hill", "green sea", "wide town"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_bm25_finds_words_of_any_script_however_they_are_coded(script, form):
    text, query, other = SCRIPTS[script]
    text = unicodedata.normalize(form, text)
    retriever = BM25Retriever.of_texts([*OTHERS, text])
    assert retriever.retrieve([query, other], 1).rows.tolist() == [[len(OTHERS)], [-1]]


@pytest.mark.parametrize("script", SCRIPTS)
def test_equal_texts_are_equal_however_they_are_coded_and_marked(script):
    text, _, other = SCRIPTS[script]
    asked = f"«{unicodedata.normalize('NFD', text.upper())}»؟"
    assert copy_key(text) == copy_key(unicodedata.normalize("NFD", text)) != copy_key(other)
    assert text_key(text) == text_key(asked) != text_key(other)
    with Memory(":memory:") as memory:
        memory.add(text, "found")
        for lookup in (EditLookup(memory.log), RelativeEditLookup(memory.log)):
            best = lookup.scores.most
            assert [lookup.find(q)[0].score == best for q in (asked, other)] == [True, False]


@pytest.mark.parametrize("text", WORDS)
def test_words_of_ten_scripts_are_those_worked_by_hand(text):
    assert split_words(text) == [unicodedata.normalize("NFC", word) for word in WORDS[text]]


def test_outer_marks_are_stripped_and_what_belongs_to_a_name_is_not():
    for kept in ("C#", "C++", "-5", ".5", "5%", "R&D", "don't", "👍"):
        assert strip_marks(f' "{kept}" ') == kept
    assert strip_marks(" ?! ") == "?!"
    assert drop_punctuation("what's 今天？ $5 €5") == "whats 今天 5 €5"


def test_words_of_ascii_are_those_of_any_text():
    text = "The B-52's, née 1976!"
    assert split_words(text) == ["the", "b", "52", "s", "née", "1976"]
    plain = text.replace("é", "e")
    assert split_words(plain) == split_words(f"{plain} “”")  # the quotes are not ASCII
    assert split_words("猫, 2024年", singles=True) == ["猫", "2024", "年"]
    assert split_words("İstanbul") == split_words("istanbul") == split_words("ISTANBUL")
