"""The simulated user who corrects labels, and what is counted of it."""

import pytest
from conftest import write_jsonl

from pgra.config import DataArguments, FolderArguments, RunArguments, RuntimeArguments
from pgra.core import Example, Prediction
from pgra.errors import DataError
from pgra.experiments.label_study import draw_corrections, leave_out_words, study_corrections
from pgra.memory.labels import PromptMemoryArguments
from pgra.methods.base import Decisions, Method
from pgra.runs import run as make_run

TEXTS = ["one two three", "four five six", "seven eight nine", "ten eleven twelve"]
TEXTS += ["one two thre", "a river", "a hill", "seven eight nin"]
TRUTH = ["positive", "negative", "positive", "negative", "positive", "positive", *["negative"] * 2]


class AlwaysNegative(Method):
    """A method from outside: "negative" of every text."""

    def decide(self, examples):
        scores = {"negative": 0.8, "positive": 0.2}
        return Decisions([Prediction(e.id, "negative", scores) for e in examples])


@pytest.fixture
def run(tmp_path):
    """A run on eight texts, of which the first half holds two that it decides wrongly."""
    rows = [{"text": t, "label": y} for t, y in zip(TEXTS, TRUTH, strict=True)]
    train = [{"text": f"text {i}", "label": TRUTH[i % 2]} for i in range(20)]
    data = DataArguments(
        task="sst2",
        train_file=str(write_jsonl(tmp_path / "train.jsonl", train)),
        test_file=str(write_jsonl(tmp_path / "test.jsonl", rows)),
    )
    method = f"{__name__}:AlwaysNegative"
    sections = {
        "runtime": RuntimeArguments(method=method, artifacts_dir=str(tmp_path), device="cpu"),
        "data": data,
        "folder": FolderArguments(output_dir=str(tmp_path / "run")),
    }
    return make_run(RunArguments(sections)).folder


def study(run, **changes):
    how = {"probabilities": [1.0], "seeds": [0], "weights": [0.25, 0.6], **changes}
    memory = PromptMemoryArguments(memory_lookup="edit", memory_threshold=-1)
    return study_corrections(run, memory, **how)


def test_what_a_correction_mends_and_breaks_is_counted_by_set_and_weight(run):
    rows = {(row.texts, row.weight): row for row in study(run)}
    again = rows["first half again", 0.6]
    assert (again.n, again.corrections, again.aided) == (4, 2, 2)
    assert (again.without, again.with_memory, again.mended, again.broken) == (0.5, 1, 2, 0)
    weak = rows["first half again", 0.25]  # 0.6 against 0.4: the model stands
    assert (weak.aided, weak.with_memory, weak.mended) == (2, 0.5, 0)
    copies = rows["first half, words left out", 0.6]  # one word of three is farther than 1
    assert (copies.aided, copies.with_memory) == (0, 0.5)
    other = rows["second half", 0.6]  # "thre" is mended, "nin" means otherwise and breaks
    assert (other.aided, other.mended, other.broken, other.mcnemar_p) == (2, 1, 1, 1)
    many = study(run, probabilities=[0.5, 1.0], seeds=[0, 1])
    assert len(many) == 3 * 2 * 3  # sets, weights; with certainty one seed is enough


def test_a_user_corrects_the_same_for_a_seed_and_all_with_certainty():
    wrong = [Example(str(i), {"text": str(i)}, "yes") for i in range(200)]
    half = draw_corrections(wrong, 0.5, 0)
    assert half == draw_corrections(wrong, 0.5, 0) != draw_corrections(wrong, 0.5, 1)
    assert 70 < len(half) < 130
    assert draw_corrections(wrong, 1, 0) == wrong


def test_a_near_copy_lacks_one_word_in_eight_and_depends_on_the_text_alone():
    text = " ".join(f"word{i}" for i in range(16))
    copy = leave_out_words(Example("a", {"text": text}, "yes"))
    assert len(copy.text.split()) == 14
    assert set(copy.text.split()) < set(text.split())
    assert leave_out_words(Example("b", {"text": text}, "no")).text == copy.text
    assert leave_out_words(Example("c", {"text": "alone"})).text == "alone"


def test_a_run_without_a_wrong_decision_is_refused(run):
    path = run / "predictions.jsonl"
    path.write_text(path.read_text().replace('"label": "positive"', '"label": "negative"'))
    with pytest.raises(DataError, match="all 4 texts of the first half rightly"):
        study(run)
