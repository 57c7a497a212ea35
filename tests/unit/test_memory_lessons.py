"""What a small LM is taught so that it can be corrected, and that none of it is measured."""

import json
import signal
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path

import pytest
import torch
from following_lm import write_stream
from small_training import at_batch, signal_self

from pgra.cli import main
from pgra.errors import ArtifactError, ConfigError, DataError, Stopped
from pgra.lm.load import find_model, load_tokenizer
from pgra.memory.families import list_yamls, load_family
from pgra.memory.lessons import (
    IGNORED,
    SEEN_FILE,
    FinetuneArguments,
    Lesson,
    Seen,
    draw_lessons,
    load_lessons,
    measured_forms,
    nearest_form,
    pack_lessons,
    read_courses,
    read_seen,
    word_of,
)
from pgra.memory.lookup import MAX_DISTANCE, find_collisions, normalize_key
from pgra.memory.prompts import PromptExample, load_few_shot
from pgra.memory.stream import make_stream, read_words
from pgra.memory.train import train_lm
from pgra.reader.causal import CausalModule, pad

LEXICAL, SCRAMBLE = load_lessons("lexical"), load_lessons("scramble")


def draw(lessons, count=400, *, seed=0):
    return list(islice(draw_lessons(lessons, seed=seed), count))


@pytest.mark.parametrize("name", list_yamls("memory_training"))
def test_no_lesson_asks_what_a_family_asks_or_what_is_near_it(name):
    measured = [
        normalize_key(way.question)
        for one in list_yamls("memory")
        for way in load_family(one).phrasings
    ]
    forms = {lesson.form for lesson in draw(load_lessons(name))}
    assert len(forms) > 100  # made-up ones are always others
    assert not {form for form in forms if nearest_form(form)}
    assert nearest_form(measured[0] + "x") == measured[0]  # the control
    keys = [*forms, *measured_forms()]
    near = find_collisions(keys, keys)
    assert all(
        (pair.first < len(forms)) == (pair.second < len(forms))
        for pair in near
        if pair.distance <= MAX_DISTANCE
    )


@pytest.mark.parametrize("lessons", [LEXICAL, SCRAMBLE], ids=["lexical", "scramble"])
def test_answers_show_the_type_that_the_clarification_names(lessons):
    family = lessons.family
    drawn = [lesson.shown for lesson in draw(lessons)]
    for shown in drawn:
        (kind,) = [kind for kind in family.answers if family.is_understood(kind, shown.answer)]
        named = [k for k, meant in lessons.meant.items() if meant in shown.feedback]
        assert named == ([kind] if shown.feedback else [])
    clarified = sum(bool(shown.feedback) for shown in drawn) / len(drawn)
    assert 0.5 < clarified < 0.8


def test_words_of_measured_streams_are_left_out(tmp_path):
    steps = make_stream(LEXICAL.family, LEXICAL.words, num_steps=20, seed=0)
    stream = tmp_path / "stream.jsonl"
    shouted = [replace(one, word=one.word.upper()) for one in steps]  # letters of any case
    write_stream(stream, shouted)
    held_out = {word_of(step, LEXICAL.family) for step in steps}
    (course,) = read_courses(FinetuneArguments(held_out=[str(stream)]))
    seen = {lesson.word for lesson in draw(course)}
    assert seen.isdisjoint(held_out)
    assert not {lesson.word for lesson in draw(LEXICAL)}.isdisjoint(held_out)  # the control
    Seen(seen, set()).check_unseen(steps, LEXICAL.family)
    with pytest.raises(DataError, match="type '.*' is none of the family 'scramble'"):
        read_courses(FinetuneArguments(lessons=["scramble"], held_out=[str(stream)]))
    every = [replace(steps[0], kind="syn", word=word) for word in LEXICAL.words["syn"]]
    write_stream(stream, every)
    with pytest.raises(DataError, match="no word of type 'syn' is left to learn with"):
        read_courses(FinetuneArguments(held_out=[str(stream)]))


def test_a_scrambled_word_is_held_out_by_what_it_was():
    steps = make_stream(SCRAMBLE.family, SCRAMBLE.words, num_steps=30, seed=0)
    assert {word_of(step, SCRAMBLE.family) for step in steps} <= set(SCRAMBLE.words[""])
    assert not any(step.word in SCRAMBLE.words[""] for step in steps)


def test_word_lists_go_to_the_lessons_they_suit(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("stonework\nab\n")
    (course,) = read_courses(FinetuneArguments(lessons=["scramble"], words=[str(words)]))
    assert set(course.words[""]) == {*SCRAMBLE.words[""], "stonework"}
    with pytest.raises(ConfigError, match="words.txt, which suits none of the lessons lexical"):
        read_courses(FinetuneArguments(words=[str(words)]))
    assert read_words(words, SCRAMBLE.family) == {"": {"stonework": ["stonework"]}}


def test_a_stream_of_learned_words_or_questions_is_refused(tmp_path):
    steps = make_stream(LEXICAL.family, LEXICAL.words, num_steps=5, seed=0)
    Seen({"abacus"}, {"what of"}).check_unseen(steps, LEXICAL.family)  # the control
    with pytest.raises(DataError, match=f"fine-tuned with the word '{steps[2].word}'"):
        Seen({steps[2].word}, ()).check_unseen(steps, LEXICAL.family)
    form = normalize_key(steps[0].question)
    with pytest.raises(DataError, match=f"fine-tuned with the question '{form}'"):
        Seen((), {form}).check_unseen(steps, LEXICAL.family)
    assert read_seen("bundled:smollm2-135m") is None
    (tmp_path / SEEN_FILE).write_text(json.dumps(Seen({"a"}, {"b"}).as_json()))
    assert read_seen(str(tmp_path)) == Seen(frozenset("a"), frozenset("b"))
    (tmp_path / SEEN_FILE).write_text("{}")
    with pytest.raises(ArtifactError, match="is damaged .*: run pgra memory finetune again"):
        read_seen(str(tmp_path))


FEW_SHOT = load_few_shot("lexical")


@pytest.fixture(scope="module")
def lm(lm_dirs):
    return str(lm_dirs["llama"])


def packed(lm, lessons, *, tokens=300):
    tokenizer = load_tokenizer(find_model(lm))
    return tokenizer, pack_lessons(lessons, tokenizer, FEW_SHOT, pack_tokens=tokens, seed=0)


def test_answers_alone_are_learned_and_the_text_is_the_prompters(lm):
    lessons = draw(LEXICAL, 50)
    left = iter(lessons)
    tokenizer, packs = packed(lm, left, tokens=2000)
    pack = next(packs)
    shown = lessons[: lessons.index(next(left)) - 1]  # one more was drawn that waits
    assert tokenizer.decode(pack.input_ids) == "".join(FEW_SHOT.show(one.shown) for one in shown)
    learned = tokenizer.decode([token for token in pack.labels if token != IGNORED])
    assert learned == "".join(f"{one.shown.answer} END" for one in shown)
    assert all(
        label in (IGNORED, token) for token, label in zip(pack.input_ids, pack.labels, strict=True)
    )


def test_separators_are_cut_as_at_a_prompts_end_and_as_within_it():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Joins line breaks only where nothing follows them, as GPT-2's rules do.
    vocab = {token: place for place, token in enumerate(["?", "ĊĊ", "Ċ", "###", "x", "Ġx"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    lesson = Lesson(PromptExample("x", "x"), "x", "x")
    alone = tokenizer(FEW_SHOT.write("x", num_own=0)).input_ids
    whole = tokenizer(FEW_SHOT.show(lesson.shown)).input_ids
    assert whole[: len(alone)] != alone
    found = set()
    size = len(whole) + 2
    for seed in range(8):
        lead = {"pack_tokens": size, "seed": seed, "lead_ids": [9]}
        ids = next(pack_lessons(repeat(lesson), tokenizer, FEW_SHOT, **lead)).input_ids
        assert ids.pop(0) == 9
        found.add("cut" if ids[: len(alone)] == alone else "whole" if ids == whole else "other")
    assert found == {"cut", "whole"}


def test_a_sequence_is_never_longer_than_asked_and_a_lesson_never_cut(lm):
    _, packs = packed(lm, draw_lessons(LEXICAL, seed=0), tokens=250)
    sizes = [len(pack.input_ids) for pack in islice(packs, 10)]
    assert max(sizes) <= 250
    assert min(sizes) > 100
    with pytest.raises(ConfigError, match="pack_tokens is 9, and a lesson has .* tokens: raise it"):
        next(packed(lm, draw_lessons(LEXICAL, seed=0), tokens=9)[1])


def test_what_fills_a_shorter_sequence_is_not_learned():
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}]
    both = pad([*rows, {"input_ids": [8], "labels": [8]}])
    assert both["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert both["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]


COURSES = [LEXICAL, SCRAMBLE]


def train(lm, folder, **changes):
    values = {"max_steps": 4, "packs_per_step": 2, "learning_rate": 1e-2, "frozen_layers": 1}
    values |= {"save_steps": 2, "pack_tokens": 300, "device": "cpu", **changes}
    return train_lm(COURSES, FinetuneArguments(lm=lm, output_dir=str(folder), **values))


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_stopped_training_ends_with_the_weights_of_one_that_was_not(lm, tmp_path):
    whole = train(lm, tmp_path / "whole")
    with (
        at_batch(6, signal_self(signal.SIGTERM), kind=CausalModule),
        pytest.raises(Stopped, match="after step 3 of 4"),
    ):
        train(lm, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "lm").exists()
    again = train(lm, tmp_path / "stopped")
    ours, others = weights(tmp_path / "whole" / "lm"), weights(tmp_path / "stopped" / "lm")
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    assert again == whole
    assert read_seen(str(tmp_path / "whole" / "lm")) == whole
    assert [p.name for p in sorted((tmp_path / "stopped").iterdir())] == [
        *("lm", "losses.jsonl", "run.json")
    ]
    start = weights(Path(lm))
    frozen = {name for name in start if torch.equal(start[name], ours[name])}
    assert any(".layers.0." in name for name in frozen)
    assert not any(".layers.1.mlp" in name for name in frozen)
    assert train(lm, tmp_path / "whole") == whole  # done: nothing is trained
    with pytest.raises(ArtifactError, match="was made with max_steps 4, this run asks for 5"):
        train(lm, tmp_path / "whole", max_steps=5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--held_out", "none.jsonl"), "none.jsonl does not exist"),
        (("--frozen_layers", "2"), "frozen_layers is 2, and '"),
        (("--pack_tokens", "9"), "pack_tokens is 9, and a lesson has"),
        (("--pack_tokens", "99999"), "pack_tokens is 99999, and '"),
    ],
)
def test_a_users_error_is_one_line_and_leaves_nothing(
    lm, tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "finetune", "--lm", lm, *flags]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
