"""What looks feedback up and is trained: GUD-IR's generator, and a layer that follows feedback."""

import json

import numpy as np
import pytest
import torch
from conftest import write_jsonl
from small_training import at_batch

from pgra.cli import main
from pgra.core import Context
from pgra.encoders.encoder import DenseLayer, Encoder
from pgra.memory.families import load_family
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import (
    EditLookup,
    FeedbackGenerator,
    GeneratingLookup,
    LookupArguments,
    load_lookup,
)
from pgra.memory.stream import Step, read_pairs
from pgra.memory.train import (
    FeedbackModule,
    GeneratorArguments,
    SimilarityArguments,
    cosines,
    fit_head,
    save_with_head,
    train_encoder,
    train_generator,
)

CPU = Context(device="cpu")
PAIRS = [
    Step("", "syn", "what is like < a > ?", "a synonym"),
    Step("", "syn", "what is akin to < b > ?", "a synonym"),
    Step("", "ant", "what is unlike < c > ?", "an antonym"),
    Step("", "ant", "what is against < d > ?", "an antonym"),
]


@pytest.fixture
def log(tmp_path):
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        yield log


def found(lookup, text, k=1):
    return [(match.entry.feedback, match.score) for match in lookup.find(text, k)]


class Table:
    """A generator that says what a table has."""

    def __init__(self, said):
        self.fingerprint = {"generator": "table"}
        self.write = lambda question: said.get(question, "")


def test_gud_ir_finds_the_feedback_nearest_to_the_one_that_is_written(log):
    """The paper's example: lexically far situations with one feedback (App. A.1)."""
    log.write("tom hated skating because he had no balance", "practicing to improve your skills")
    log.write("jordyn hated soccer", "saying what you like")
    rough = {"jordyn was trying to improve her soccer": "practising to improve skills"}
    lookup = GeneratingLookup(Table(rough), EditLookup(log, of_feedback=True))
    assert found(lookup, next(iter(rough)))[0][0] == "practicing to improve your skills"
    assert found(EditLookup(log), next(iter(rough)))[0][0] == "saying what you like"  # by the key
    assert lookup.find("another") == []  # nothing is written for it
    assert lookup.fingerprint["nearest"] == {"lookup": "edit", "of": "feedback"}


def small(**more):
    values = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "save_steps": 2, "seed": 1}
    return GeneratorArguments(**{**values, **more})


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def trained(t5_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gud") / "gud-ir"
    return train_generator(PAIRS, folder, small(model=str(t5_dir)), CPU)


def test_a_trained_generator_is_a_model_folder_and_the_work_is_gone(trained, t5_dir):
    assert trained.steps == 4
    assert weights(trained.folder) != weights(t5_dir)
    about = json.loads((trained.folder / "trained_on.json").read_text())
    assert (about["num_pairs"], about["seed"]) == (4, 1)
    assert [path.name for path in trained.folder.parent.iterdir()] == ["gud-ir"]
    generator = FeedbackGenerator(str(trained.folder), device="cpu")
    written = generator.write(PAIRS[0].question)
    assert written == " ".join(written.split())
    other = FeedbackGenerator(str(t5_dir), device="cpu")
    assert other.fingerprint != generator.fingerprint


def killed():
    raise KeyboardInterrupt


def test_a_killed_training_goes_on_and_gives_the_same_weights(trained, t5_dir, tmp_path):
    arguments, folder = small(model=str(t5_dir)), tmp_path / "gud-ir"
    with at_batch(4, killed, kind=FeedbackModule), pytest.raises(KeyboardInterrupt):
        train_generator(PAIRS, folder, arguments, CPU)
    assert not folder.exists()
    train_generator(PAIRS, folder, arguments, CPU)
    assert weights(folder) == weights(trained.folder)
    other = small(model=str(t5_dir), seed=2)  # the control
    assert weights(train_generator(PAIRS, tmp_path / "other", other, CPU).folder) != weights(folder)


def test_gud_ir_is_opened_with_its_models_and_vectors_of_its_own(trained, encoder_dir, log):
    log.write("q", "a synonym")
    told = {"generator": str(trained.folder), "encoder": str(encoder_dir)}
    args = LookupArguments(lookup="gud-ir", **told)
    assert args.gate == 0.9
    lookup = load_lookup(args, CPU)(log)
    written = FeedbackGenerator(str(trained.folder), device="cpu").write("q")
    assert len(lookup.find("q")) == bool(written)
    keys = load_lookup(LookupArguments(lookup="encoder", encoder=str(encoder_dir)), CPU)
    keys(log).find("q")
    by_edit = LookupArguments(lookup="gud-ir", feedback_by="edit", **told)
    assert by_edit.gate == -5
    assert load_lookup(by_edit, CPU)(log).fingerprint["nearest"]["of"] == "feedback"
    folders = list(log.path.with_name("memory.sqlite.vectors").iterdir())
    assert len(folders) == 1 + bool(written)


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
    again, _ = fit_head(vectors, wanted, how)
    assert torch.equal(again.weight, head.weight)


@pytest.mark.parametrize("target", ["feedback", "type"])
def test_a_trained_encoder_is_one_that_any_look_up_takes(target, encoder_dir, tmp_path, log):
    how = SimilarityArguments(target=target, encoder=str(encoder_dir), width=8, num_steps=20)
    done = train_encoder(PAIRS, tmp_path / "similar", how, CPU)
    encoder = Encoder.from_name(str(done.folder), device="cpu")
    assert encoder.width == 8
    vectors = encoder.encode([pair.question for pair in PAIRS])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    args = LookupArguments(lookup="encoder", encoder=str(done.folder))
    log.write(PAIRS[0].question, PAIRS[0].feedback)
    assert found(load_lookup(args, CPU)(log), PAIRS[0].question)[0][1] > 0.99
    assert json.loads((done.folder / "trained_on.json").read_text())["target"] == target


def test_a_head_stands_behind_what_the_encoder_had_before(encoder_dir, tmp_path):
    draw = torch.Generator().manual_seed(0)
    base = Encoder.from_name(str(encoder_dir), device="cpu")
    texts = ["a", "another text"]
    vectors = torch.from_numpy(base.encode(texts))
    first = DenseLayer(
        torch.randn(5, base.width, generator=draw), torch.randn(5, generator=draw), "Tanh", ""
    )
    save_with_head(base, first, tmp_path / "one")
    one = Encoder.from_name(str(tmp_path / "one"), device="cpu")
    by_hand = torch.nn.functional.normalize(first.apply(vectors), dim=-1)
    np.testing.assert_allclose(one.encode(texts), by_hand, atol=1e-5)
    second = DenseLayer(torch.randn(3, 5, generator=draw), torch.zeros(3), "Tanh", "")
    save_with_head(one, second, tmp_path / "two")
    two = Encoder.from_name(str(tmp_path / "two"), device="cpu")
    by_hand = torch.nn.functional.normalize(second.apply(by_hand), dim=-1)
    np.testing.assert_allclose(two.encode(texts), by_hand, atol=1e-5)


def pairs(path, family=None):
    return [(pair.question, pair.feedback, pair.kind) for pair in read_pairs(path, family)]


def test_pairs_come_from_streams_memories_and_exports(tmp_path, log, monkeypatch):
    row = {"question": "q", "feedback": "clarification: f", "type": "syn", "word": "w"}
    stream = write_jsonl(tmp_path / "s.jsonl", [row])
    assert pairs(stream) == [("q", "f", "syn")]
    whole = write_jsonl(tmp_path / "w.jsonl", [row | {"expected_answer": "x"}])
    assert pairs(whole, load_family("lexical")) == [("q", "f", "syn")]
    log.write("q", "f")
    log.write("gone", "f")
    log.forget(2)
    assert pairs(log.path) == [("q", "f", "")]
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "export", "log.jsonl"]) == 0
    assert pairs(tmp_path / "log.jsonl") == [("q", "f", "")]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"question": "q", "feedback": "f"}], (), "there are 1 questions to learn from"),
        ([{"question": "q", "feedback": "f"}] * 4, ("--target", "type"), "the question 'q' has no"),
        (
            [{"question": "q", "feedback": "f", "type": "syn"}] * 4,
            ("--target", "type"),
            "all 4 questions are of type 'syn'",
        ),
    ],
)
def test_what_cannot_be_learned_from_is_refused_in_one_line(tmp_path, capsys, rows, words, message):
    path, folder = write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "out"
    words = ["train-similarity", str(path), "--output_dir", str(folder), *words]
    assert main(["memory", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not folder.exists()
