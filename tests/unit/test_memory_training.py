"""What a memory's models learn, and that a stop changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SENTENCES, write_jsonl
from small_training import at_batch

from pgra.artifacts import lock_folder
from pgra.core import Context
from pgra.encoders.encoder import DenseLayer, Encoder
from pgra.errors import ArtifactError
from pgra.memory.families import load_family
from pgra.memory.lookup import EditLookup, GeneratingLookup
from pgra.memory.stream import Step, read_pairs
from pgra.memory.train import (
    FeedbackModule,
    GeneratorArguments,
    SimilarityArguments,
    cosines,
    fit_head,
    save_with_head,
    train_generator,
)

pytestmark = pytest.mark.slow

CPU = Context(device="cpu")
PAIRS = [
    Step("", "syn", "what is like < a > ?", "a synonym"),
    Step("", "syn", "what is akin to < b > ?", "a synonym"),
    Step("", "ant", "what is unlike < c > ?", "an antonym"),
    Step("", "ant", "what is against < d > ?", "an antonym"),
]


def found(lookup, text):
    return lookup.find(text)[0].feedback


def test_gud_ir_finds_the_feedback_nearest_to_the_one_that_is_written(memory):
    """The paper's example: lexically far situations with one feedback (App. A.1)."""
    memory.add("tom hated skating because he had no balance", "practicing to improve your skills")
    memory.add("jordyn hated soccer", "saying what you like")
    asked, rough = "jordyn was trying to improve her soccer", "practising to improve skills"
    nearest = EditLookup(memory.log, form="feedback")
    lookup = GeneratingLookup(lambda text: rough if text == asked else "", "a table", nearest)
    assert found(lookup, asked) == "practicing to improve your skills"
    assert found(EditLookup(memory.log), asked) == "saying what you like"  # by the key
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
    for there in (folder, Path(), Path("/")):
        with pytest.raises(ArtifactError, match="is there already"):
            train_generator(PAIRS, there, arguments, CPU)


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


SAVED = [
    {"pooling": "max", "normalize": False, "max_encoder_tokens": 9},
    {"pooling": "last", "query_prompt": "the town: ", "passage_prompt": "a film: "},
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", SAVED, ids=str)
def test_a_saved_encoder_is_one_of_sentence_transformers(encoder_dir, tmp_path, how):
    library = pytest.importorskip("sentence_transformers")
    before, draw = Encoder.load(str(encoder_dir), device="cpu", **how), torch.Generator()
    head = DenseLayer(torch.randn(5, 16, generator=draw), None, "Tanh", "")
    save_with_head(before, head, tmp_path / "s")
    after = Encoder.load(str(tmp_path / "s"), device="cpu")
    theirs = library.SentenceTransformer(str(tmp_path / "s"), device="cpu")
    for is_query, encode in ((False, theirs.encode_document), (True, theirs.encode_query)):
        vectors = torch.from_numpy(before.encode(SENTENCES, is_query=is_query))
        expected = torch.nn.functional.normalize(head.apply(vectors), dim=-1).numpy()
        np.testing.assert_allclose(encode(SENTENCES), expected, atol=1e-5)
        np.testing.assert_allclose(after.encode(SENTENCES, is_query=is_query), expected, atol=1e-5)
    assert np.ptp(expected, axis=0).max() > 0.05  # the control: texts differ


def pairs(path, family=None):
    return [(pair.question, pair.feedback, pair.kind) for pair in read_pairs(path, family)]


def test_pairs_come_from_streams_memories_and_exports(tmp_path, memory):
    row = {"question": "q", "feedback": "clarification: f", "type": "syn", "word": "w"}
    stream = write_jsonl(tmp_path / "s.jsonl", [row])
    assert pairs(stream) == [("q", "f", "syn")]
    whole = write_jsonl(tmp_path / "w.jsonl", [row | {"expected_answer": "x"}])
    assert pairs(whole, load_family("lexical")) == [("q", "f", "syn")]
    memory.add("q", "f")
    assert pairs(memory.path) == [("q", "f", "")]
    memory.export(tmp_path / "log.jsonl")
    assert pairs(tmp_path / "log.jsonl") == [("q", "f", "")]
