"""The simulated user who corrects labels, and what is counted of it."""

import json

import pytest

from pgra.commands.memory import main
from pgra.core import Example, Prediction
from pgra.errors import ConfigError, DataError
from pgra.experiments import label_study
from pgra.experiments.label_study import Aided, draw_corrections, leave_out_words, study_corrections
from pgra.memory.labels import LabelMemory, PromptMemoryArguments, mix_labels

LABELS = ("no", "yes")
SCORES = {"no": 0.8, "yes": 0.2}


class AlwaysNo:
    """A real decision rule for the bookkeeping: "no" of every text, and the mixing of `predict`."""

    task, inputs = "rule", ("text",)

    def decide(self, examples):
        return [Prediction(e.id, "no", SCORES) for e in examples]

    def decide_with(self, texts, memory):
        opened = LabelMemory(memory, task="rule", inputs=("text",), labels=LABELS)
        with opened as labels:
            found = [labels.recall(example.fields) for example in texts.examples]
        return {
            weight: [
                Aided(mix_labels(one, near, weight=weight).label, bool(near))
                for one, near in zip(texts.unaided, found, strict=True)
            ]
            for weight in (0.25, 0.6)
        }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Eight texts, of which the first half holds two that "no" is wrong for."""
    texts = ["one two three", "four five six", "seven eight nine", "ten eleven twelve"]
    texts += ["one two thre", "a river", "a hill", "seven eight nin"]
    labels = ["yes", "no", "yes", "no", "yes", "yes", "no", "no"]
    lines = [
        {
            "id": f"t{i}",
            "text": t,
            "label": y,
            "prediction": "no",
            "scores": {"no": 0.8, "yes": 0.2},
        }
        for i, (t, y) in enumerate(zip(texts, labels, strict=True))
    ]
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(label_study, "Subject", lambda *_, **__: AlwaysNo())
    return tmp_path


def study(run, **changes):
    how = {"probabilities": [1.0], "seeds": [0], "weights": [], **changes}
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


def test_a_user_corrects_the_same_for_a_seed_and_all_with_certainty():
    wrong = [Example(str(i), {"text": str(i)}, "yes") for i in range(200)]
    half = draw_corrections(wrong, 0.5, 0)
    assert half == draw_corrections(wrong, 0.5, 0) != draw_corrections(wrong, 0.5, 1)
    assert 70 < len(half) < 130
    assert draw_corrections(wrong, 1, 0) == wrong


def test_a_near_copy_lacks_one_word_in_eight_and_depends_on_the_text_alone():
    text = " ".join(f"word{i}" for i in range(16))
    copy = leave_out_words(Example("a", {"text": text}, "yes"))
    assert copy.label == "yes"
    assert len(copy.text.split()) == 14
    assert set(copy.text.split()) < set(text.split())
    assert leave_out_words(Example("b", {"text": text}, "no")).text == copy.text
    assert leave_out_words(Example("c", {"text": "alone"})).text == "alone"


def test_a_run_without_a_wrong_decision_is_refused(run):
    path = run / "predictions.jsonl"
    path.write_text(path.read_text().replace('"label": "yes"', '"label": "no"'))
    with pytest.raises(DataError, match="all 4 texts of the first half rightly"):
        study(run)


def test_the_command_shows_means_over_seeds_and_keeps_every_row(run, capsys):
    output = run / "rows.jsonl"
    words = ["--run", str(run), "--correction_probabilities", "0.5", "1", "--seeds", "0", "1"]
    words += ["--memory_lookup", "edit", "--memory_threshold", "-1"]
    assert main(["labels", *words, "--output", str(output)]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.replace("|", " ").split()) for line in table]
    assert len(table) == 2 + 3 * 2 * 2  # head; sets, probabilities, weights
    assert "first half again 1 0.6 2 2 0.500 1.000 2 0" in rows
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 3 * 2 * 3  # with certainty one seed is enough
    for extra, told in (
        (["--memory", "m"], "memory names m, and the simulated user fills one of its own"),
        (["--memory_weights", "2"], "memory_weights holds 2: each must be from 0 to 1"),
        (["--seeds"], "seeds"),
    ):
        with pytest.raises(ConfigError, match=told):
            main(["labels", *words, *extra])
