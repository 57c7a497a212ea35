"""What a memory's models learn, that none of it is measured, and that a stop changes nothing."""

import shutil
import signal
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SENTENCES, write_jsonl
from following_lm import write_stream
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein
from safetensors.torch import load_file
from small_training import at_batch, signal_self

from pgra.artifacts import lock_folder
from pgra.core import Context
from pgra.encoders.encoder import DenseLayer, Encoder
from pgra.errors import ArtifactError, DataError, ModelError, Stopped
from pgra.lm.load import find_model, load_tokenizer
from pgra.memory.families import load_family
from pgra.memory.lessons import (
    IGNORED,
    FinetuneArguments,
    Seen,
    draw_lessons,
    load_lessons,
    measured_forms,
    pack_lessons,
    read_courses,
    read_seen,
    word_of,
)
from pgra.memory.log import export_log
from pgra.memory.lookup import (
    MAX_DISTANCE,
    EditLookup,
    GeneratingLookup,
    normalize_key,
)
from pgra.memory.prompts import PromptExample, load_few_shot
from pgra.memory.stream import Step, make_stream, read_pairs
from pgra.memory.train import (
    FeedbackModule,
    GeneratorArguments,
    SimilarityArguments,
    cosines,
    fit_head,
    save_with_head,
    train_generator,
    train_lm,
)
from pgra.reader.causal import CausalModule, pad

LEXICAL, SCRAMBLE = load_lessons("lexical"), load_lessons("scramble")


def draw(lessons, count=400, *, seed=0):
    """Draw lessons, and tell what was seen of them."""
    seen = Seen(set(), set())
    return list(islice(draw_lessons(lessons, seen, seed=seed), count)), seen


@pytest.mark.parametrize("lessons", [LEXICAL, SCRAMBLE], ids=["words", "scrambles"])
def test_lessons_ask_nothing_near_what_families_ask_and_show_the_type_that_is_named(lessons):
    family, (drawn, seen) = lessons.family, draw(lessons)
    forms, measured = list(seen.questions), measured_forms()
    assert len(forms) > 100  # made-up ones are always others
    assert process.cdist(forms, measured, scorer=Levenshtein.distance).min() > MAX_DISTANCE
    for shown in drawn:
        (kind,) = [kind for kind in family.answers if family.is_understood(kind, shown.answer)]
        named = [k for k, meant in lessons.meant.items() if meant in shown.feedback]
        assert named == ([kind] if shown.feedback else [])
    clarified = sum(bool(shown.feedback) for shown in drawn) / len(drawn)
    assert 0.5 < clarified < 0.8


def test_words_of_measured_streams_are_left_out_and_a_stream_of_learned_ones_is_refused(tmp_path):
    steps = make_stream(LEXICAL.family, LEXICAL.words, num_steps=20, seed=0)
    stream = str(write_stream(tmp_path / "stream.jsonl", steps))
    held_out = {word_of(step, LEXICAL.family) for step in steps}
    (course,) = read_courses(FinetuneArguments(held_out=[stream]))
    seen = draw(course)[1].words
    assert seen.isdisjoint(held_out)
    assert not draw(LEXICAL)[1].words.isdisjoint(held_out)  # the control
    Seen(seen, set()).check_unseen(steps, LEXICAL.family)
    with pytest.raises(DataError, match=f"fine-tuned with the word '{steps[2].word}'"):
        Seen({steps[2].word}, set()).check_unseen(steps, LEXICAL.family)
    form = normalize_key(steps[0].question)
    with pytest.raises(DataError, match=f"fine-tuned with the question '{form}'"):
        Seen(set(), {form}).check_unseen(steps, LEXICAL.family)


FEW_SHOT = load_few_shot("lexical")


@pytest.fixture(scope="module")
def lm(lm_dirs):
    return lm_dirs["llama"]


@pytest.fixture(scope="module")
def tokenizer(lm):
    return load_tokenizer(find_model(str(lm)))


def test_answers_alone_are_learned_and_the_text_is_the_prompters(tokenizer):
    lessons, _ = draw(LEXICAL, 50)
    left = iter(lessons)
    pack = next(pack_lessons(left, tokenizer, FEW_SHOT, pack_tokens=2000, seed=0))
    assert 1000 < len(pack["input_ids"]) <= 2000
    shown = lessons[: lessons.index(next(left)) - 1]  # one more was drawn that waits
    assert tokenizer.decode(pack["input_ids"]) == "".join(map(FEW_SHOT.show, shown))
    learned = tokenizer.decode([token for token in pack["labels"] if token != IGNORED])
    assert learned == "".join(f"{one.answer} END" for one in shown)
    assert all(
        label in (IGNORED, token)
        for token, label in zip(pack["input_ids"], pack["labels"], strict=True)
    )


def test_separators_are_cut_as_at_a_prompts_end_and_as_within_it():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Joins line breaks only where nothing follows them, as GPT-2's rules do.
    vocab = {token: place for place, token in enumerate(["?", "ĊĊ", "Ċ", "###", "x", "Ġx"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    lesson = PromptExample("x", "x")
    alone = tokenizer(FEW_SHOT.write("x", num_own=0)).input_ids
    whole = tokenizer(FEW_SHOT.show(lesson)).input_ids
    assert whole[: len(alone)] != alone
    found = []
    for seed in range(8):
        how = {"pack_tokens": len(whole) + 2, "seed": seed, "lead_ids": [9]}
        lead, *ids = next(pack_lessons(repeat(lesson), tokenizer, FEW_SHOT, **how))["input_ids"]
        assert lead == 9
        found.append((ids[: len(alone)] == alone, ids == whole))
    assert set(found) == {(True, False), (False, True)}


def test_what_fills_a_shorter_sequence_is_not_learned():
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}]
    both = pad([*rows, {"input_ids": [8], "labels": [8]}])
    assert both["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert both["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]


COURSES = [LEXICAL, SCRAMBLE]


def train(lm, folder, **changes):
    values = {"max_steps": 4, "packs_per_step": 2, "learning_rate": 1e-2, "frozen_layers": 1}
    values |= {"save_steps": 2, "pack_tokens": 300, "device": "cpu", **changes}
    return train_lm(COURSES, FinetuneArguments(lm=str(lm), output_dir=str(folder), **values))


def test_a_stopped_training_ends_with_the_weights_of_one_that_was_not(lm, tmp_path):
    one, other = tmp_path / "whole", tmp_path / "stopped"
    whole = train(lm, one)
    with (
        at_batch(6, signal_self(signal.SIGTERM), kind=CausalModule),
        pytest.raises(Stopped, match="after step 3 of 4"),
    ):
        train(lm, other)
    assert not (other / "lm").exists()
    assert train(lm, other) == whole == read_seen(str(one / "lm"))
    ours, others, start = (
        load_file(f / "model.safetensors") for f in (one / "lm", other / "lm", lm)
    )
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    frozen = {name for name in start if torch.equal(start[name], ours[name])}
    assert any(".layers.0." in name for name in frozen)
    assert not any(".layers.1.mlp" in name for name in frozen)
    (one / "checkpoint-4").mkdir()  # as a kill leaves it, behind the LM and before the end
    assert train(lm, one) == whole
    assert not list(one.glob("checkpoint-*"))
    with pytest.raises(ArtifactError, match="was made with max_steps 4, this run asks for 5"):
        train(lm, one, max_steps=5)


# What looks feedback up and is trained.


CPU = Context(device="cpu")
PAIRS = [
    Step("", "syn", "what is like < a > ?", "a synonym"),
    Step("", "syn", "what is akin to < b > ?", "a synonym"),
    Step("", "ant", "what is unlike < c > ?", "an antonym"),
    Step("", "ant", "what is against < d > ?", "an antonym"),
]


def found(lookup, text):
    return lookup.find(text)[0].entry.feedback


def test_gud_ir_finds_the_feedback_nearest_to_the_one_that_is_written(log):
    """The paper's example: lexically far situations with one feedback (App. A.1)."""
    log.write("tom hated skating because he had no balance", "practicing to improve your skills")
    log.write("jordyn hated soccer", "saying what you like")
    asked, rough = "jordyn was trying to improve her soccer", "practising to improve skills"
    nearest = EditLookup(log, form="feedback")
    lookup = GeneratingLookup(lambda text: rough if text == asked else "", "a table", nearest)
    assert found(lookup, asked) == "practicing to improve your skills"
    assert found(EditLookup(log), asked) == "saying what you like"  # by the key
    assert lookup.find("another") == []  # nothing is written for it


def small(**more):
    values = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "save_steps": 2, "seed": 1}
    return GeneratorArguments(**values, **more)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(t5_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gud") / "gud-ir"
    return train_generator(PAIRS, folder, small(model=str(t5_dir)), CPU)


def killed():
    raise KeyboardInterrupt


def test_a_killed_training_goes_on_to_the_same_model_folder(trained, t5_dir, tmp_path):
    arguments, folder = small(model=str(t5_dir)), tmp_path / "gud-ir"
    with at_batch(4, killed, kind=FeedbackModule), pytest.raises(KeyboardInterrupt):
        train_generator(PAIRS, folder, arguments, CPU)
    with lock_folder(folder, is_new=True), pytest.raises(ArtifactError, match="in use by another"):
        train_generator(PAIRS, folder, arguments, CPU)
    assert not folder.exists()
    assert train_generator(PAIRS, folder, arguments, CPU).steps == trained.steps == 4
    assert weights(folder) == weights(trained.folder) != weights(t5_dir)
    assert list(tmp_path.iterdir()) == [folder]  # the work is gone
    left, another = (tmp_path / f".{name}-{'0' * 12}.training" for name in ("gud-ir", "gud-ir-2"))
    for path in (left, another):  # the one as a kill leaves it, behind the model
        path.mkdir()
    for there in (folder, Path(), Path("/")):
        with pytest.raises(ArtifactError, match="is there already"):
            train_generator(PAIRS, there, arguments, CPU)
    assert set(tmp_path.iterdir()) == {folder, another}


@pytest.mark.parametrize("file", ["model.safetensors", "trained_on.json", "checksums.json"])
def test_a_trained_model_that_is_not_as_it_was_written_is_refused_by_name(trained, tmp_path, file):
    copy = shutil.copytree(trained.folder, tmp_path / "copy")
    find_model(str(copy))  # the control
    data = bytearray((copy / file).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / file).write_bytes(data)
    with pytest.raises(ModelError, match=f"{copy / file} is damaged.*: train it again, or delete"):
        find_model(str(copy))
    (copy / "checksums.json").unlink()
    find_model(str(copy))


def test_a_layer_learns_what_a_target_asks_for():
    """Vectors are a type's direction and a larger one of the word; the layer drops the word."""
    draw = torch.Generator().manual_seed(0)
    kinds = ["syn", "ant", "hom"] * 16
    types = torch.eye(3)[[0, 1, 2] * 16]
    vectors = torch.cat([types, 2 * torch.randn(48, 8, generator=draw)], dim=1)
    wanted = torch.from_numpy(np.equal.outer(kinds, kinds)).float()
    others = ~torch.eye(48, dtype=torch.bool)
    before = (cosines(vectors) - wanted)[others].square().mean()
    how = SimilarityArguments(width=16, num_steps=120, learning_rate=0.01)
    head, loss = fit_head(vectors, wanted, how)
    after = (cosines(head.apply(vectors)) - wanted)[others].square().mean()
    assert after < 0.1 * before
    assert loss == pytest.approx(after.item(), rel=1)


def test_a_head_stands_behind_what_the_encoder_had_before(encoder_dir, tmp_path):
    draw, folder, texts = torch.Generator().manual_seed(0), encoder_dir, ["a", "another text"]
    expected = torch.from_numpy(Encoder.from_name(str(folder), device="cpu").encode(texts))
    for width in (5, 3):
        before = Encoder.from_name(str(folder), device="cpu")
        weight = torch.randn(width, before.width, generator=draw)
        head = DenseLayer(weight, torch.randn(width, generator=draw), "Tanh", "")
        folder = tmp_path / f"{width} wide"
        save_with_head(before, head, folder)
        expected = torch.nn.functional.normalize(head.apply(expected), dim=-1)
        after = Encoder.from_name(str(folder), device="cpu")
        np.testing.assert_allclose(after.encode(texts), expected, atol=1e-5)


SAVED = [
    {},
    {"pooling": "pooler"},
    {"pooling": "max", "normalize": False, "max_encoder_tokens": 9},
    {"pooling": "last", "query_prompt": "the town: ", "passage_prompt": "a film: "},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", SAVED, ids=str)
def test_a_saved_encoder_is_one_of_sentence_transformers(encoder_dir, tmp_path, how):
    library = pytest.importorskip("sentence_transformers")
    before, draw = Encoder.from_name(str(encoder_dir), device="cpu", **how), torch.Generator()
    head = DenseLayer(torch.randn(5, 16, generator=draw), None, "Tanh", "")
    save_with_head(before, head, tmp_path / "s")
    after = Encoder.from_name(str(tmp_path / "s"), device="cpu")
    theirs = library.SentenceTransformer(str(tmp_path / "s"), device="cpu")
    for is_query, encode in ((False, theirs.encode_document), (True, theirs.encode_query)):
        vectors = torch.from_numpy(before.encode(SENTENCES, is_query=is_query))
        expected = torch.nn.functional.normalize(head.apply(vectors), dim=-1).numpy()
        np.testing.assert_allclose(encode(SENTENCES), expected, atol=1e-5)
        np.testing.assert_allclose(after.encode(SENTENCES, is_query=is_query), expected, atol=1e-5)
    assert np.ptp(expected, axis=0).max() > 0.05  # the control: texts differ


def pairs(path, family=None):
    return [(pair.question, pair.feedback, pair.kind) for pair in read_pairs(path, family)]


def test_pairs_come_from_streams_memories_and_exports(tmp_path, log):
    row = {"question": "q", "feedback": "clarification: f", "type": "syn", "word": "w"}
    stream = write_jsonl(tmp_path / "s.jsonl", [row])
    assert pairs(stream) == [("q", "f", "syn")]
    whole = write_jsonl(tmp_path / "w.jsonl", [row | {"expected_answer": "x"}])
    assert pairs(whole, load_family("lexical")) == [("q", "f", "syn")]
    log.write("q", "f")
    assert pairs(log.path) == [("q", "f", "")]
    export_log(log, tmp_path / "log.jsonl")
    assert pairs(tmp_path / "log.jsonl") == [("q", "f", "")]
