"""GUD-IR: what its model learns from, what it finds, and that a stop changes nothing."""

import pytest
from conftest import write_jsonl
from small_training import at_batch
from test_memory_lookup import LetterEncoder

from pgra.context import Context
from pgra.errors import ArtifactError
from pgra.memory.families import load_family
from pgra.memory.gud_ir import FeedbackModule, GeneratingLookup, read_pairs, train_generator
from pgra.memory.lookup import EditLookup, GeneratorArguments

pytestmark = pytest.mark.slow

CPU = Context(device="cpu")
PAIRS = [
    ("what is like < a > ?", "a synonym"),
    ("what is akin to < b > ?", "a synonym"),
    ("what is unlike < c > ?", "an antonym"),
    ("what is against < d > ?", "an antonym"),
]


def test_gud_ir_finds_the_feedback_nearest_to_the_one_that_is_written(memory):
    """The paper's example: lexically far situations with one feedback (App. A.1)."""
    memory.add("tom hated skating because he had no balance", "practicing to improve your skills")
    memory.add("jordyn hated soccer", "saying what you like")
    asked, rough = "jordyn was trying to improve her soccer", "practising to improve skills"
    write = {asked: rough}.get
    lookup = GeneratingLookup(memory.log, write, "a table", encoder=LetterEncoder())
    assert lookup.find(asked)[0].feedback == "practicing to improve your skills"
    assert EditLookup(memory.log).find(asked)[0].feedback == "saying what you like"  # by the key
    assert lookup.find("another") == []  # nothing is written for it


def killed():
    raise KeyboardInterrupt


def test_a_killed_training_goes_on_to_the_same_model_folder(t5_dir, tmp_path):
    values = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "save_steps": 2, "seed": 1}
    arguments, folder = GeneratorArguments(model=str(t5_dir), **values), tmp_path / "gud-ir"
    unbroken = train_generator(PAIRS, tmp_path / "unbroken", arguments, CPU)
    with at_batch(4, killed, kind=FeedbackModule), pytest.raises(KeyboardInterrupt):
        train_generator(PAIRS, folder, arguments, CPU)
    assert not folder.exists()
    assert train_generator(PAIRS, folder, arguments, CPU).steps == unbroken.steps == 4
    made = [path / "model.safetensors" for path in (folder, unbroken.folder, t5_dir)]
    first, second, before = (path.read_bytes() for path in made)
    assert first == second != before
    assert sorted(tmp_path.iterdir()) == [folder, unbroken.folder]  # the work is gone
    with pytest.raises(ArtifactError, match=str(folder)):
        train_generator(PAIRS, folder, arguments, CPU)


def test_pairs_come_from_streams_memories_and_exports(tmp_path, memory):
    row = {"question": "q", "feedback": "clarification: f", "type": "syn", "expected_answer": "x"}
    stream = write_jsonl(tmp_path / "s.jsonl", [row])
    assert read_pairs(stream, load_family("lexical")) == [("q", "f")]
    memory.update(memory.add("q", "another").id, "f")
    memory.delete(memory.add("r", "g").id)
    memory.export(tmp_path / "log.jsonl")
    assert read_pairs(memory.path) == read_pairs(tmp_path / "log.jsonl") == [("q", "f")]
