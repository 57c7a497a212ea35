import pytest

from pgra.errors import ConfigError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer

SLOTTED = "{text} It was <extra_id_0> ."


def test_a_target_fills_the_slot_only_if_the_template_has_one():
    words = {"bad": "terrible"}
    assert Verbalizer(words, SLOTTED).target_text("bad") == "<extra_id_0> terrible <extra_id_1>"
    assert Verbalizer(words, "Review: {text} Answer:").target_text("bad") == "terrible"


def test_target_tokens_are_sentinel_word_sentinel_end(reader_dir):
    tokenizer = load_tokenizer(find_model(str(reader_dir)))
    verbalizer = Verbalizer({"bad": "terrible"}, SLOTTED)
    verbalizer.audit(tokenizer)
    slots = tokenizer(["<extra_id_0>", "<extra_id_1>"], add_special_tokens=False).input_ids
    (start,), (end,) = slots
    assert tokenizer.unk_token_id not in (start, end)
    ((first, *word, last, eos),) = verbalizer.target_ids(tokenizer)
    assert (first, last, eos) == (start, end, tokenizer.eos_token_id)
    assert tokenizer.decode(word).strip() == "terrible"


def test_words_are_found_without_case_punctuation_or_articles():
    verbalizer = Verbalizer({"bad": "terrible", "good": "great"}, SLOTTED)
    assert verbalizer.label_of_word(" A Great! ") == "good"
    assert verbalizer.label_of_word("greatest") is None


NO_SLOT = "'<extra_id_0>' is no token of this reader: give a --reader_template"


@pytest.mark.parametrize(
    ("reader", "words", "decode", "message"),
    [
        ("t5", {"x": "a b", "y": "a▁b"}, "verbalizer", r"'a▁b' \(y\) are the same tokens"),
        ("t5", {"x": "a b", "y": "a c"}, "official", "begin with one token"),
        ("t5", {"snow": "☃"}, "verbalizer", "'☃' of label 'snow' is not in the reader's vocab"),
        ("byt5", {"x": "bad", "y": "good"}, "official", "all 2 labels are more to this reader"),
        ("gpt2", {"x": "a"}, "verbalizer", NO_SLOT),
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


@pytest.mark.slow
def test_entity_is_two_tokens_of_the_real_t5():
    tokenizer = load_tokenizer(find_model("bundled:t5-small-titles"))
    words = ["Description", "Entity", "Expression", "Human", "Location", "Number"]
    audit = Verbalizer({word.lower(): word for word in words}, SLOTTED).audit(tokenizer)
    assert audit == ("entity",)
