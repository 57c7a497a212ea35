"""Prompts as they are written: which exemplars, in what order and words, and within the window."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgra.data.tasks import Task
from pgra.errors import ConfigError, DataError
from pgra.exemplars.selection import vote
from pgra.exemplars.selector import build_prompt, pool_task
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts import (
    FORMATS,
    SEPARATOR,
    PromptTemplate,
    Verbalizer,
    answer_words,
    fit_prompts,
    task_format,
)
from pgra.types import Example

LABELS = ["a", "b", "c"]
WORDS = {"a": "Apple", "b": "Bee", "c": "Cat"}
TEMPLATE = PromptTemplate("Which?\n{text}")
# 'c' is rare and late, as ABBR is in TREC
EXAMPLES = [
    Example(f"train-{i}", {"text": f"text {i}"}, "c" if i >= 37 else LABELS[i % 2])
    for i in range(40)
]
SHOWN = [
    Example("train-0", {"text": "A warm film."}, "positive"),
    Example("train-1", {"text": "Dull,\n\nlong."}, "negative"),
]
any_text = st.text(st.characters(codec="utf-8"), max_size=30) | st.just("{text} {0}\n\n}{")


def build(num_exemplars=8, **values):
    return build_prompt(TEMPLATE, EXAMPLES, WORDS, num_exemplars=num_exemplars, **values)


def test_a_prompt_is_exactly_what_the_paper_shows():
    two = [Example("1", {"text": "good"}, "a"), Example("2", {"text": "bad"}, "b")]
    prompt = build_prompt(TEMPLATE, two, WORDS, num_exemplars=2, seed=3)
    shown = {"1": "Which?\ngood\nThe answer is Apple", "2": "Which?\nbad\nThe answer is Bee"}
    first, second = prompt.exemplar_ids
    assert prompt.prefix == f"Follow the demonstrations:\n{shown[first]}\n\n{shown[second]}"
    assert prompt.suffix({"text": "new"}) == "\n\nWhich?\nnew\nThe answer is"


def test_official_takes_the_first_in_the_file_under_a_cap():
    # cap 8 // 3 + 1 = 3: rows 0 to 5 give three a and three b; c appears at 37, 38, and 8 are full
    expected = {f"train-{i}" for i in (0, 1, 2, 3, 4, 5, 37, 38)}
    assert set(build(method="official").exemplar_ids) == expected


def test_a_tie_of_the_vote_goes_to_the_nearest_of_the_tied():
    assert list(vote(["c", "a", "b", "b", "a"])) == ["a", "b", "c"]
    assert list(vote(["c", "b", "a", "b", "a"])) == ["b", "a", "c"]  # the control


def test_kates_prompts_are_those_of_its_table_11():
    written = task_format(Task.load("sst2"), "kate").write(SHOWN, {"text": "Red apples."})
    assert written == (
        "Sentence: A warm film. Label: Positive\n\nSentence: Dull, long. Label: Negative\n\n"
        "Sentence: Red apples. Label:"
    )
    asked = [Example("train-0", {"question": "who?"}, "Ada")]
    task = pool_task(("question",), "answer", "Q: {question}\nA: {answer}")
    written = task_format(task).write(asked, {"question": "where?"})
    assert written == "Q: who?\nA: Ada\n\nQ: where?\nA:"


LABELS_OF_PAIRS = ["equivalent", "not_equivalent"]
FIELDS = {name: task_format(Task.load("mrpc"), name) for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
@given(
    shown=st.lists(st.tuples(any_text, any_text, st.sampled_from(LABELS_OF_PAIRS)), max_size=2),
    query=st.tuples(any_text, any_text),
)
def test_any_texts_make_blocks_that_a_blank_line_parts(name, shown, query):
    """No text, whatever it holds, can look like the border between exemplars."""
    style = FIELDS[name]
    fields = [{"sentence1": pair[0], "sentence2": pair[1]} for pair in (*shown, query)]
    labels = [label for *_, label in shown]
    examples = [Example("", own, label) for own, label in zip(fields, labels, strict=False)]
    prompt = style.write(examples, fields[-1])
    blocks = prompt.removeprefix(style.template.instruction).split(SEPARATOR)
    texts = [style.template.render_query(own, after_prefix=False) for own in fields]
    words = [f" {style.words[label]}" for label in labels]
    assert blocks == [text + word for text, word in zip(texts, [*words, ""], strict=True)]
    assert not prompt.endswith(" ")  # the answer brings its own
    assert prompt.startswith(style.template.instruction) == (bool(shown) or name == "kate")


@pytest.mark.parametrize("name", FORMATS)
def test_every_label_has_a_word_that_begins_no_other(name):
    for task in map(Task.load, Task.names()):
        assert len(answer_words(task_format(task, name).words)) == len(task.labels)
    with pytest.raises(ConfigError, match=r"'un' \(a\) begins 'undone' \(b\)"):
        answer_words({"a": "un", "b": "undone"})


# Prompts fit the window by leaving exemplars out, never by cutting the query.


def fit(write, wanted, window, counted=None):
    """Fit prompts of an LM that counts words, for queries a, b, ..., three words to answer."""

    def count_tokens(texts):
        (counted if counted is not None else []).extend(texts)
        return [len(text.split()) for text in texts]

    names = list("abcde")[: len(wanted)]
    return fit_prompts(count_tokens, write, wanted, names=names, window=window, num_new_tokens=3)


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5),
    room=st.integers(3, 30),
)
def test_as_many_exemplars_are_kept_as_fit_and_the_query_is_whole(lengths, room):
    def write(query, count):
        return "e " * sum(lengths[query][:count]) + "the query"

    wanted, counted = [len(own) for own in lengths], []
    if all(own and own[0] + 2 > room for own in lengths):
        with pytest.raises(ConfigError):
            fit(write, wanted, room + 3)
        return
    found = fit(write, wanted, room + 3, counted)
    for query, own in enumerate(lengths):
        tokens = [sum(own[:count]) + 2 for count in range(len(own) + 1)]
        most = max(count for count, number in enumerate(tokens) if number <= room)
        assert (found.counts[query], found.num_dropped[query]) == (most, len(own) - most)
        assert found.num_tokens[query] == tokens[most]
    assert all(text.endswith("the query") for text in counted)


def test_a_query_that_does_not_fit_is_named():
    def write(query, count):
        return "e " * count + ("the query " if query else "q ") * 8

    counted = []
    assert fit(write, (2, 2, 2), 99, counted).num_tokens.tolist() == [10, 18, 18]
    assert len(counted) == 2  # two of the three queries are equal
    with pytest.raises(DataError, match="query b .*16"):
        fit(write, (1, 1, 1), 17)


# Verbalizers: which word the reader writes for which label.


SLOTTED = "{text} It was <extra_id_0> ."


PAIRS = [
    ("肯定", "否定"), ("はい", "いいえ"), ("예", "아니요"), ("نعم", "لا"), ("כן", "לא"),
    ("हाँ", "नहीं"), ("ใช่", "ไม่"), ("да", "нет"), ("კი", "არა"), ("sí", "no"), ("C++", "C#"),
    ("C", "C++"), ("A", "B"), ("+", "-"), ("5", "-5"), ("👍", "👎"), ("5%", "5"),
]  # fmt: skip
MARKS = ["{}.", "{}。", "{}؟", "「{}」", "«{}»", "„{}“", "¡{}!", "**{}**", "{}।", "\ufeff{}"]
NO_WORDS = ["", " ", "yess", ".", "...", "。", "「」", "the", "an", "* *", "\u200b"]


@pytest.mark.parametrize("words", PAIRS, ids=" ".join)
def test_case_coding_and_marks_around_a_word_do_not_count(words):
    verbalizer = Verbalizer(dict(zip(("one", "two"), words, strict=True)), "")
    assert verbalizer.target_text("two") == words[1]  # the reader's template has no slot
    for label, word in verbalizer.words.items():
        for mark in ("{}", " {} \n", *MARKS):
            for form in ("NFC", "NFD"):
                written = unicodedata.normalize(form, mark.format(word.upper()))
                assert verbalizer.label_of_word(written) == label, written
    for nothing in NO_WORDS:
        assert verbalizer.label_of_word(nothing) is None, nothing


@pytest.mark.parametrize("pair", [("sí", "si\u0301"), ("Straße", "STRASSE"), ("ja", "„Ja!“")])
def test_words_that_no_answer_tells_apart_are_refused(pair):
    words = dict(zip(("one", "two"), pair, strict=True))
    about = {"name": "mine", "labels": ("one", "two"), "prompt": "{text}"}
    with pytest.raises(ConfigError, match="prompt_words: "):
        Task(**about, prompt_words=words)
    with pytest.raises(ConfigError, match="words: "):
        Verbalizer(words, "")
    assert Task(**about, prompt_words={**words, "one": "another"})  # the control


def test_target_tokens_are_sentinel_word_sentinel_end(reader_dir):
    tokenizer = load_tokenizer(find_model(str(reader_dir)))
    verbalizer = Verbalizer({"bad": "terrible"}, SLOTTED)
    ((first, *word, last, eos),) = verbalizer.target_ids(tokenizer)
    slots = tokenizer(["<extra_id_0>", "<extra_id_1>"], add_special_tokens=False).input_ids
    assert slots == [[first], [last]]
    assert (tokenizer.decode(word).strip(), eos) == ("terrible", tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("reader", "words", "decode", "message"),
    [
        ("t5", {"x": "a b", "y": "a▁b"}, "verbalizer", "a b, a▁b"),
        ("t5", {"x": "a b", "y": "a c"}, "official", "a"),
        ("t5", {"snow": "☃"}, "verbalizer", "☃"),
        ("byt5", {"x": "bad", "y": "good"}, "official", "more"),
        ("gpt2", {"x": "a"}, "verbalizer", "<extra_id_0>"),
    ],
)
def test_words_that_cannot_be_told_apart_or_written_are_refused(
    t5_dirs, lm_dirs, reader, words, decode, message
):
    tokenizer = load_tokenizer(find_model(str({**t5_dirs, **lm_dirs}[reader])))
    verbalizer = Verbalizer(words, SLOTTED)
    with pytest.raises(ConfigError, match=message):
        verbalizer.audit(tokenizer, decode=decode)
    if decode == "official":  # the control: more than one token, told apart by the second
        assert verbalizer.audit(tokenizer) == ("x", "y")
