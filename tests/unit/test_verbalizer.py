import pytest

from pgra.errors import ConfigError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer

SLOTTED = "{text} It was <extra_id_0> ."


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


def _pieces(tokenizer, word):
    return tokenizer(word, add_special_tokens=False).input_ids


def test_a_target_fills_the_slot_only_if_the_template_has_one():
    words = {"bad": "terrible", "good": "great"}
    assert Verbalizer(words, SLOTTED).target_text("bad") == "<extra_id_0> terrible <extra_id_1>"
    assert Verbalizer(words, "Review: {text} Answer:").target_text("bad") == "terrible"


def test_target_tokens_are_sentinel_word_sentinel_end(reader_dir):
    tokenizer = load_tokenizer(find_model(str(reader_dir)))
    verbalizer = Verbalizer({"bad": "terrible"}, SLOTTED)
    verbalizer.audit(tokenizer)
    (start,), (end,) = (_pieces(tokenizer, slot) for slot in ("<extra_id_0>", "<extra_id_1>"))
    assert tokenizer.unk_token_id not in (start, end)
    (found,) = verbalizer.target_ids(tokenizer)
    assert found[0] == start
    assert found[-2:] == [end, tokenizer.eos_token_id]
    assert tokenizer.decode(found[1:-2]).strip() == "terrible"
    assert found[1:-2] != _pieces(tokenizer, "great")


def test_words_are_found_without_case_punctuation_or_articles():
    verbalizer = Verbalizer({"bad": "terrible", "good": "great"}, SLOTTED)
    assert verbalizer.label_of_word(" A Great! ") == "good"
    assert verbalizer.label_of_word("greatest") is None


def test_words_of_the_same_tokens_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"'a b' \(x\) and 'a▁b' \(y\) are the same tokens"):
        Verbalizer({"x": "a b", "y": "a▁b"}, SLOTTED).audit(tokenizer)


def test_official_refuses_words_that_begin_alike_and_the_verbalizer_does_not(tokenizer):
    verbalizer = Verbalizer({"x": "a b", "y": "a c"}, SLOTTED)
    assert verbalizer.audit(tokenizer) == ("x", "y")
    with pytest.raises(ConfigError, match="begin with one token"):
        verbalizer.audit(tokenizer, decode="official")


def test_official_is_refused_where_no_label_can_be_right(t5_dirs):
    bytewise = load_tokenizer(find_model(str(t5_dirs["byt5"])))
    verbalizer = Verbalizer({"bad": "terrible", "good": "great"}, SLOTTED)
    assert len(verbalizer.audit(bytewise)) == len(verbalizer.words)
    with pytest.raises(ConfigError, match="words of all 2 labels are more to this reader: use --d"):
        verbalizer.audit(bytewise, decode="official")


def test_words_outside_the_vocabulary_are_refused(tokenizer, t5_dirs):
    snow = Verbalizer({"snow": "☃"}, "{text}")
    with pytest.raises(ConfigError, match="'☃' of label 'snow' is not in the reader's vocabulary"):
        snow.audit(tokenizer)
    snow.audit(load_tokenizer(find_model(str(t5_dirs["byt5"]))))  # which has all there is


def test_a_slot_that_is_no_token_is_refused(lm_dirs):
    other = load_tokenizer(find_model(str(lm_dirs["gpt2"])))
    with pytest.raises(
        ConfigError, match="'<extra_id_0>' is no token of this reader: give a --reader_template"
    ):
        Verbalizer({"x": "a"}, SLOTTED).audit(other)


@pytest.mark.slow
def test_entity_is_two_tokens_of_the_real_t5():
    tokenizer = load_tokenizer(find_model("bundled:t5-small-titles"))
    words = ["Description", "Entity", "Expression", "Human", "Location", "Number"]
    audit = Verbalizer({word.lower(): word for word in words}, SLOTTED).audit(tokenizer)
    assert audit == ("entity",)
