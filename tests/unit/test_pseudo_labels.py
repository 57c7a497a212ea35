"""Label consistency from folders: a tiny plain reader labels the evidence of written runs."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import with_rerank, with_retriever

from pgra.commands.consistency import main
from pgra.commands.evidence import main as show_evidence
from pgra.core import ALONE, Example, Prediction
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.experiments.consistency import (
    compare_evidence,
    label_texts,
    open_labeler,
    report_consistency,
    ways_of,
)
from pgra.lm.load import find_model, load_tokenizer
from pgra.methods.stages import Stages
from pgra.reader.calibrate import Calibration
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SegmentLayout
from pgra.reader.predict import T5Classifier
from pgra.reader.record import Reader, ReaderRecord, write_record
from pgra.report.results import EvidenceLine, RunRecord, write_results
from pgra.rerank.similarity import SIMILARITIES

LABELS = ("negative", "positive")
RECORD = ReaderRecord(
    task="reviews",
    inputs=("text",),
    metric="accuracy",
    words={"negative": "warm", "positive": "old"},
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


def random_reader(t5_dir, seed):
    reader = FusionReader.from_name(str(t5_dir))
    generator = torch.Generator().manual_seed(seed)
    for parameter in reader.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.4
    return reader.eval()


def save_labeler(t5_dir, folder):
    """Write the first reader of random weights that does not say one label of all texts."""
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    for seed in range(100):
        model = random_reader(t5_dir, seed)
        said = [one.label for one in Reader(RECORD, model, tokenizer).predict(TEXTS)]
        if 2 <= said.count("positive") <= 4:
            break
    T5Classifier(model, tokenizer, RECORD.verbalizer).save(folder / "reader")
    write_record(folder / "reader", RECORD)
    return folder


@pytest.fixture(scope="module")
def labeler(t5_dir, tmp_path_factory):
    return save_labeler(t5_dir, tmp_path_factory.mktemp("runs") / "plain")


def test_what_was_read_before_it_was_stopped_is_not_read_again(labeler, tmp_path, monkeypatch):
    predict, read = Reader.predict, []

    def stopped(self, texts, *args, **more):
        if len(read) == 4:
            raise KeyboardInterrupt
        read.extend(texts)
        return predict(self, texts, *args, **more)

    monkeypatch.setattr(Reader, "predict", stopped)
    with pytest.raises(KeyboardInterrupt):
        label_texts(open_labeler(labeler), TEXTS, tmp_path / "kept", device="cpu", save_every=2)
    monkeypatch.setattr(Reader, "predict", predict)
    found = label_texts(open_labeler(labeler), TEXTS, tmp_path / "kept", device="cpu")
    assert (read, found.num_read) == (TEXTS[:4], 2)
    whole = label_texts(open_labeler(labeler), TEXTS, tmp_path / "whole", device="cpu")
    assert (whole.labels, whole.num_read) == (found.labels, 6)


def write_run(
    folder,
    queries,
    evidence,
    *,
    task="reviews",
    labels=LABELS,
    train="digest-of-train",
    seed=0,
    method=None,
):
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
    marks, method = {"train": train}, method or folder.name
    record = RunRecord(task, "test", "accuracy", labels, seed, {}, marks, method=method)
    write_results(folder, record, examples, predictions, lines)
    return folder


QUIET = {"device": "cpu", "plots": False, "centre": False}
QUERIES = ["query one", "query two", "query three"]


def write_two_runs(folder):
    pgra = write_run(folder / "pgra", QUERIES, [TEXTS[:3], TEXTS[1:4], TEXTS[:3]])
    fid = write_run(folder / "fid", QUERIES, [TEXTS[3:], TEXTS[:3], TEXTS[2:5]])
    return [pgra, fid]


@pytest.fixture
def runs(tmp_path):
    return write_two_runs(tmp_path)


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
    first = report_consistency(runs[:1], out, labelers=[labeler], **QUIET)
    assert read == TEXTS[:4]
    assert first.num_read == 4
    both = report_consistency(runs, out, labelers=[labeler], **QUIET)
    assert sorted(read) == sorted(TEXTS)
    assert both.num_read == 2
    again = report_consistency(runs, out, labelers=[labeler], **QUIET)
    assert len(read) == len(TEXTS)
    assert again.num_read == 0
    assert again.tables == both.tables


def test_a_pseudo_label_is_what_the_reader_says_of_the_text_alone(labeler, runs, tmp_path):
    report = report_consistency(runs, tmp_path / "out", labelers=[labeler], **QUIET)
    reader = Reader.load(labeler, device="cpu")
    said = {text: reader.predict([text])[0].label for text in TEXTS}
    assert set(said.values()) == set(LABELS)  # else nothing could be told
    for name, run in zip(("fid", "pgra"), report.runs, strict=True):
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
    assert written["baseline"] == "fid"
    markdown = (tmp_path / "out" / "consistency.md").read_text()
    assert all(table.to_markdown() in markdown for table in report.tables)
    assert (tmp_path / "out" / "consistency.csv").read_text().startswith("run,task,seeds,d,")


def test_another_labelers_labels_are_never_mixed_in(labeler, runs, read, tmp_path):
    out = tmp_path / "out"
    report_consistency(runs[:1], out, labelers=[labeler], **QUIET)
    other = shutil.copytree(labeler, tmp_path / "other")
    layout = SegmentLayout("{text} This is <extra_id_0> .", "query_first", 64)
    write_record(other / "reader", replace(RECORD, layout=layout))
    report = report_consistency(runs[:1], out, labelers=[other], **QUIET)
    assert report.num_read == 4
    assert len(list((out / "pseudo_labels").glob("reviews-*.jsonl"))) == 2


def test_a_folder_of_runs_has_its_own_labeler_and_seeds_are_put_together(
    labeler, runs, tmp_path, caplog
):
    folder = tmp_path / "all"
    write_run(folder / "plain", QUERIES, [[], [], []])
    shutil.copytree(labeler / "reader", folder / "plain" / "reader")
    for seed in (0, 1):
        evidence = [TEXTS[:3], TEXTS[1:4], TEXTS[:3]]
        write_run(folder / f"seed-{seed}", QUERIES, evidence, seed=seed, method="pgra")
    with caplog.at_level("INFO", "pgra"):
        report = report_consistency([folder], tmp_path / "out", **QUIET)
    (both,) = report.runs
    assert (both.name, both.seeds, both.queries.sum()) == ("pgra", 2, 6)
    alone = report_consistency(runs[:1], tmp_path / "two", labelers=[labeler], **QUIET)
    assert both.score == alone.runs[0].score
    assert "plain on reviews has no evidence: left out" in caplog.text


def test_a_grid_gives_its_rows_its_baseline_and_what_is_missing(labeler, tmp_path):
    grid, points = tmp_path / "grid", []
    evidence = {"T5": [], "FiD": TEXTS[:2], "PGRA": TEXTS[2:4]}
    for name, method in (("T5", "plain"), ("FiD", "fid"), ("PGRA", "pgra")):
        folders = {str(seed): f"{name}/seed-{seed}" for seed in (0, 1)}
        points.append({"name": name, "values": {"method": method}, "seeds": folders})
        for seed in (0, 1)[: 1 if name == "PGRA" else 2]:
            run = write_run(grid / folders[str(seed)], QUERIES, [evidence[name]] * 3, seed=seed)
            values = json.loads((run / "metrics.json").read_text())
            (run / "metrics.json").write_text(json.dumps({**values, "method": method}))
    shutil.copytree(labeler / "reader", grid / "T5" / "seed-0" / "reader")
    told_of = {"name": "mine", "title": "Mine", "axes": ["method"], "seeds": [0, 1]}
    rows = {"labels": {}, "reference": None, "baseline": {"method": "fid"}, "points": points}
    (grid / "grid.json").write_text(json.dumps({**told_of, **rows}))
    report = report_consistency([grid], tmp_path / "out", **QUIET)
    assert [(run.name, run.seeds) for run in report.runs] == [("FiD", 2), ("PGRA", 1)]
    assert "difference to FiD" in report.tables[0].columns
    assert "Missing: PGRA (seed 1)." in told(report)


def test_the_command_writes_tables_and_plots(labeler, runs, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--labeler", str(labeler), "--runs", *map(str, runs), "--output_dir", str(out)]
    assert main([*words, "--device", "cpu", "--no_centre"]) == 0
    told = capsys.readouterr().out
    assert "Label consistency of evidence" in told
    assert "reviews: by number of consistent evidence" in told
    assert "6 texts were read." in told
    for kind in ("png", "svg"):
        for name in ("counts", "scores"):
            path = out / f"{name}-reviews.{kind}"
            assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
            assert path.stat().st_size > 2000


def told(report):
    return " ".join(note for table in report.tables for note in table.notes)


def test_runs_that_cannot_be_used_are_named(labeler, runs, tmp_path):
    other = write_run(tmp_path / "other", ["else", *QUERIES[1:]], [TEXTS[:2]] * 3)
    task = write_run(tmp_path / "task", QUERIES, [TEXTS[:2]] * 3, task="trec")
    labels = write_run(tmp_path / "labels", QUERIES, [TEXTS[:2]] * 3, labels=("no", "yes"))
    plain = write_run(tmp_path / "plain", QUERIES, [[], [], []])
    out = tmp_path / "out"
    how = {"labelers": [labeler], **QUIET}
    with pytest.raises(ArtifactError, match="pgra and .*other cannot stand in one table.*test set"):
        report_consistency([*runs, other], out, **how)
    with pytest.raises(ConfigError, match="no labeler is of task 'trec': give a finished run of"):
        report_consistency([*runs, task], out, **how)
    with pytest.raises(
        DataError, match="labels has the labels no, yes, its labeler .*negative, po"
    ):
        report_consistency([labels], out, **how)
    with pytest.raises(DataError, match="no run has evidence to be consistent with"):
        report_consistency([plain], out, **how)
    with pytest.raises(ConfigError, match="unknown baseline 'fud'. Did you mean 'fid'"):
        report_consistency(runs, out, baseline="fud", **how)
    assert not out.exists()


def test_a_labeler_that_reads_evidence_is_refused(labeler, runs, tmp_path):
    reads = shutil.copytree(labeler, tmp_path / "reads")
    write_record(reads / "reader", replace(RECORD, num_evidence=2))
    with pytest.raises(ConfigError, match="reads 2 evidence texts a query.*--num_evidence 0"):
        open_labeler(reads)
    with pytest.raises(ConfigError, match="two labelers are of the same task"):
        report_consistency(runs, tmp_path / "out", labelers=[labeler] * 2, **QUIET)
    with pytest.raises(ArtifactError, match="does not exist"):
        open_labeler(tmp_path / "none")


def test_damaged_labels_are_refused(labeler, tmp_path):
    found = label_texts(open_labeler(labeler), TEXTS[:1], tmp_path, device="cpu")
    assert list(found.labels) == TEXTS[:1]
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text('{"text": "the red')
    with pytest.raises(ArtifactError, match="is damaged: delete it and run again"):
        label_texts(open_labeler(labeler), TEXTS[:1], tmp_path, device="cpu")


def evidence_by_hand(args, labeler, depth):
    stages = Stages.read(args, ALONE)
    stages.find(("test",))
    texts = [[line.text for line in own[:depth]] for own in stages.evidence_lines("test")]
    reader = Reader.load(labeler)
    return np.mean(
        [
            np.mean([one.label == example.label for one in reader.predict(own)])
            for example, own in zip(stages.data.examples("test"), texts, strict=True)
        ]
    )


def test_each_ways_own_evidence_is_measured_without_a_reader(labeler, args, tmp_path):
    args = with_rerank(args, num_evidence=2)
    study = compare_evidence(args, labeler, tmp_path / "out", depths=[1, 2], centre=False)
    names = ["random", "first stage", *SIMILARITIES]
    assert [(run.depth, run.name) for run in study.runs] == [(d, n) for d in (1, 2) for n in names]
    scores = {(run.name, run.depth): run.score for run in study.runs}
    cosine = with_rerank(args, similarity="cosine")
    for depth in (1, 2):
        assert scores["cosine", depth] == pytest.approx(evidence_by_hand(cosine, labeler, depth))
    assert len(set(scores.values())) > 2  # the control
    values = json.loads((tmp_path / "out" / "evidence.json").read_text())
    assert [way["score"] for way in values["ways"]] == [run.score for run in study.runs]
    centred = compare_evidence(args, labeler, tmp_path / "out", depths=[1, 2])
    assert [run.score for run in centred.runs] != [run.score for run in study.runs]
    written = json.loads((tmp_path / "out" / "evidence.json").read_text())["labeler"]
    assert written["corpus_labels"]["positive"] == pytest.approx(0.5, abs=0.1)
    whole = ways_of(with_rerank(args, bank="full"))
    assert whole["exhaustive cosine"].is_exhaustive


def test_with_a_prefix_a_query_the_similarities_of_two_states_are_measured(labeler, args, tmp_path):
    args = with_rerank(args, num_evidence=2, exemplars="knn")
    study = compare_evidence(args, labeler, tmp_path / "out", centre=False)
    assert [run.name for run in study.runs] == ["random", "first stage", "cosine", "dot"]
    by_hand = evidence_by_hand(with_rerank(args, similarity="cosine"), labeler, 2)
    assert study.runs[2].score == pytest.approx(by_hand)


def test_ways_that_cannot_be_compared_are_refused(labeler, args, tmp_path):
    for change in (with_retriever(args, retriever="exhaustive"), with_rerank(args, num_evidence=0)):
        with pytest.raises(ConfigError, match="the ways are compared with a first stage"):
            compare_evidence(change, labeler, tmp_path)
    with pytest.raises(ConfigError, match="depth is 4: it must lie between 1 and num_evidence, 3"):
        compare_evidence(args, labeler, tmp_path, depths=[4])
    with pytest.raises(ConfigError, match="--labeler is missing"):
        show_evidence(["--output_dir", str(tmp_path)])
    with pytest.raises(ConfigError, match="--output_dir is missing"):
        show_evidence(["--labeler", str(labeler)])
