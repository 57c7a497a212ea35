"""Label consistency from folders: a tiny plain reader labels the evidence of written runs."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from pgra.commands.consistency import main
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.evaluation.results import EvidenceLine, RunRecord, write_results
from pgra.models.fid import FusionReader
from pgra.models.loading import find_model, load_tokenizer
from pgra.pipelines.consistency import report_consistency
from pgra.pipelines.pseudo_labels import label_texts, open_labeler
from pgra.reader.checkpoints import save_reader
from pgra.reader.inputs import SegmentLayout
from pgra.reader.record import ReaderRecord, write_record
from pgra.reader.temperature import Calibration
from pgra.reader.trained import Reader
from pgra.types import Example, Prediction

LABELS = ("negative", "positive")
RECORD = ReaderRecord(
    task="reviews",
    inputs=("text",),
    metric="accuracy",
    words={"negative": "warm", "positive": "old"},  # random weights say now one, now the other
    layout=SegmentLayout("{text} It was <extra_id_0> .", "query_first", 64),
    decode="verbalizer",
    length_normalize=False,
    calibration=Calibration(),
    num_evidence=0,
    method="t5",
    prompt=None,
    base_model={"name": "tiny", "identity": "ab"},
    seed=3,
    arguments={},
    fingerprints={"train": "digest-of-train"},
)
TEXTS = ["the red sea", "a film", "an old house", "apples in the garden", "plot", "a warm cast"]


@pytest.fixture(scope="module")
def labeler(t5_dir, tmp_path_factory):
    model = FusionReader.from_name(str(t5_dir))
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.4
    folder = tmp_path_factory.mktemp("runs") / "plain"
    save_reader(model, load_tokenizer(find_model(str(t5_dir))), folder / "reader")
    write_record(folder / "reader", RECORD)
    return folder


def write_run(folder, queries, evidence, *, task="reviews", labels=LABELS, train="digest-of-train"):
    """Write a run whose reader is right but for the last query."""
    examples = [Example(f"test-{i}", {"text": q}, labels[i % 2]) for i, q in enumerate(queries)]
    said = [example.label for example in examples]
    said[-1] = labels[0] if said[-1] == labels[1] else labels[1]
    predictions = [
        Prediction(example.id, label, dict.fromkeys(labels, 0.5))
        for example, label in zip(examples, said, strict=True)
    ]
    lines = [
        [EvidenceLine(row, text, row + 1, 0.5, 0.5) for row, text in enumerate(texts)]
        for texts in evidence
    ]
    record = RunRecord(task, "test", "accuracy", labels, 0, {}, {"train": train})
    write_results(folder, record, examples, predictions, lines)
    return folder


QUERIES = ["query one", "query two", "query three"]


@pytest.fixture
def runs(tmp_path):
    pgra = write_run(tmp_path / "pgra", QUERIES, [TEXTS[:3], TEXTS[1:4], TEXTS[:3]])
    fid = write_run(tmp_path / "fid", QUERIES, [TEXTS[3:], TEXTS[:3], TEXTS[2:5]])
    return [pgra, fid]


@pytest.fixture
def read(monkeypatch):
    """Gather the texts that readers read."""
    seen = []
    plain = Reader.predict

    def spy(self, queries, *args, **kwargs):
        seen.extend(queries)
        return plain(self, queries, *args, **kwargs)

    monkeypatch.setattr(Reader, "predict", spy)
    return seen


def test_each_distinct_text_is_read_once_over_queries_runs_and_calls(labeler, runs, read, tmp_path):
    out = tmp_path / "out"
    first = report_consistency([labeler], runs[:1], out, device="cpu", plots=False)
    assert read == TEXTS[:4]
    assert first.num_read == 4
    both = report_consistency([labeler], runs, out, device="cpu", plots=False)
    assert sorted(read) == sorted(TEXTS)
    assert both.num_read == 2
    again = report_consistency([labeler], runs, out, device="cpu", plots=False)
    assert len(read) == len(TEXTS)
    assert again.num_read == 0
    assert again.tables == both.tables


def test_a_pseudo_label_is_what_the_reader_says_of_the_text_alone(labeler, runs, tmp_path):
    report = report_consistency([labeler], runs, tmp_path / "out", device="cpu", plots=False)
    reader = Reader.load(labeler, device="cpu")
    said = {text: reader.predict([text])[0].label for text in TEXTS}
    assert set(said.values()) == set(LABELS)  # else nothing could be told
    for name, run in zip(("pgra", "fid"), report.runs, strict=True):
        lines = [
            json.loads(x) for x in (tmp_path / name / "predictions.jsonl").read_text().splitlines()
        ]
        shares = [
            sum(said[seen["text"]] == line["label"] for seen in line["evidence"]) / 3
            for line in lines
        ]
        assert run.name == name
        assert run.shares.tolist() == shares
    written = json.loads((tmp_path / "out" / "consistency.json").read_text())
    assert [run["score"] for run in written["runs"]] == [run.score for run in report.runs]
    assert (tmp_path / "out" / "consistency.md").read_text() == report.tables


def test_another_labelers_labels_are_never_mixed_in(labeler, runs, read, tmp_path):
    out = tmp_path / "out"
    report_consistency([labeler], runs[:1], out, device="cpu", plots=False)
    other = shutil.copytree(labeler, tmp_path / "other")
    layout = SegmentLayout("{text} This is <extra_id_0> .", "query_first", 64)
    write_record(other / "reader", replace(RECORD, layout=layout))
    report = report_consistency([other], runs[:1], out, device="cpu", plots=False)
    assert report.num_read == 4
    assert len(list((out / "pseudo_labels").glob("reviews-*.jsonl"))) == 2


def test_only_the_evidence_looked_at_is_read(labeler, runs, read, tmp_path):
    report_consistency([labeler], runs, tmp_path / "out", depth=1, device="cpu", plots=False)
    assert sorted(read) == sorted([TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[2]])


def test_a_folder_of_runs_gives_those_with_evidence(labeler, runs, tmp_path):
    grid = tmp_path / "grid"
    for seed, run in enumerate(runs):
        shutil.copytree(run, grid / "k=8" / f"seed-{seed}")
    write_run(grid / "plain", QUERIES, [[], [], []])
    report = report_consistency([labeler], [grid], tmp_path / "out", device="cpu", plots=False)
    assert [run.name for run in report.runs] == ["grid/k=8/seed-0", "grid/k=8/seed-1"]


def test_the_command_writes_tables_and_plots(labeler, runs, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--labeler", str(labeler), "--runs", *map(str, runs), "--output_dir", str(out)]
    assert main([*words, "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "| reviews | pgra | 3 | 3 |" in told
    assert "6 texts were read." in told
    for kind in ("png", "svg"):
        for name in ("counts", "scores"):
            path = out / f"{name}-reviews.{kind}"
            assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
            assert path.stat().st_size > 2000


def test_what_was_trained_on_other_examples_is_noted(labeler, runs, tmp_path):
    write_run(tmp_path / "odd", QUERIES, [TEXTS[:2]] * 3, train="other")
    report = report_consistency(
        [labeler], [*runs, tmp_path / "odd"], tmp_path / "out", device="cpu", plots=False
    )
    assert f"{tmp_path / 'odd'} was trained on other examples than its labeler" in report.tables
    assert f"{runs[0]} was trained on other" not in report.tables


def test_runs_that_cannot_be_used_are_all_named(labeler, runs, tmp_path):
    bad = [
        write_run(tmp_path / "other-test", ["else", *QUERIES[1:]], [TEXTS[:2]] * 3),
        write_run(tmp_path / "other-task", QUERIES, [TEXTS[:2]] * 3, task="trec"),
        write_run(tmp_path / "other-labels", QUERIES, [TEXTS[:2]] * 3, labels=("no", "yes")),
        write_run(tmp_path / "plain", QUERIES, [[], [], []]),
    ]
    out = tmp_path / "out"
    with pytest.raises(DataError, match="4 of 6 runs cannot be used") as caught:
        report_consistency([labeler], [*runs, *bad], out, device="cpu", plots=False)
    told = str(caught.value)
    assert f"{bad[0]}: it was measured on other examples than {runs[0]}" in told
    assert f"{bad[1]}: it is of task 'trec', and no labeler is" in told
    assert f"{bad[2]}: its labels are no, yes, the labeler's negative, positive" in told
    assert f"{bad[3]}: it has no evidence" in told
    assert "\n" not in told
    assert not out.exists()


def test_a_labeler_that_reads_evidence_is_refused(labeler, runs, tmp_path):
    reads = shutil.copytree(labeler, tmp_path / "reads")
    write_record(reads / "reader", replace(RECORD, num_evidence=2))
    with pytest.raises(ConfigError, match="reads 2 evidence texts a query.*--num_evidence 0"):
        open_labeler(reads)
    with pytest.raises(ConfigError, match="two labelers are of the same task"):
        report_consistency([labeler, labeler], runs, tmp_path / "out", plots=False)
    with pytest.raises(ArtifactError, match="does not exist"):
        open_labeler(tmp_path / "none")


def test_an_unfinished_run_is_refused(labeler, tmp_path):
    with pytest.raises(ArtifactError, match="is no finished run"):
        report_consistency([labeler], [tmp_path / "none"], tmp_path / "out", plots=False)


def test_damaged_labels_are_refused(labeler, tmp_path):
    found = label_texts(open_labeler(labeler), TEXTS[:1], tmp_path, device="cpu")
    assert list(found.labels) == TEXTS[:1]
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text('{"text": "the red')
    with pytest.raises(ArtifactError, match="is damaged .*delete it and run again"):
        label_texts(open_labeler(labeler), TEXTS[:1], tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--labeler is missing"),
        (["--labeler", "a"], "--runs is missing"),
        (["--labeler", "a", "--runs", "b"], "--output_dir is missing"),
        (
            ["--labeler", "a", "--runs", "b", "--output_dir", "c", "--depth", "0"],
            "depth is 0: it must be at least 1",
        ),
    ],
)
def test_a_command_with_nothing_to_do_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        main(words)
