"""Label consistency from folders: a tiny plain reader labels the evidence of written runs."""

import shutil
from dataclasses import replace

import pytest
import torch
from planted_runs import plant

from pgra.artifacts import write_sealed
from pgra.errors import ConfigError
from pgra.experiments import consistency
from pgra.experiments.consistency import label_texts, open_labeler, report_consistency
from pgra.lm.load import find_model, load_tokenizer
from pgra.reader.calibration import Calibration
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SegmentLayout
from pgra.reader.predict import T5Classifier
from pgra.reader.record import Reader, ReaderRecord, write_record
from pgra.report.results import load_run

pytestmark = pytest.mark.slow

LABELS = ("negative", "positive")
RECORD = ReaderRecord(
    task="reviews",
    inputs=("text",),
    words={"negative": "warm", "positive": "old"},
    layout=SegmentLayout("{text} It was <extra_id_0> .", "query_first", 64),
    decode="verbalizer",
    calibration=Calibration(),
    num_evidence=0,
    method="t5",
    prompt=None,
    seed=3,
    arguments={},
    fingerprints={"train": "digest-of-train"},
)
TEXTS = ["the red sea", "a film", "an old house", "apples in the garden", "plot", "a warm cast"]


@pytest.fixture(scope="module")
def labeler(t5_dir, tmp_path_factory):
    """The first reader of random weights that does not say one label of all texts."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    for seed in range(100):
        model = FusionReader.from_name(str(t5_dir)).eval()
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.4
        said = [one.label for one in Reader(RECORD, model, tokenizer).predict(TEXTS)]
        if 2 <= said.count("positive") <= 4:
            break
    T5Classifier(model, tokenizer, RECORD.verbalizer).save(folder / "reader")
    write_record(folder / "reader", RECORD)
    return folder


def write_run(folder, evidence, *, task="reviews", **how):
    """Write a run of three queries whose reader is right but for the last one."""
    about = {"method": folder.name, "fingerprints": {"train": "digest-of-train"}, "names": LABELS}
    return plant(folder, task=task, n=3, wrong=[2], evidence=evidence, **{**about, **how})


QUIET = {"device": "cpu"}
EVIDENCE = {"pgra": [TEXTS[:3], TEXTS[1:4], TEXTS[:3]], "fid": [TEXTS[3:], TEXTS[:3], TEXTS[2:5]]}


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / name, evidence) for name, evidence in EVIDENCE.items()]


@pytest.fixture
def read(monkeypatch):
    """Gather the texts that readers read; a fifth stops the process where it is asked to."""
    seen, plain = [], Reader.predict

    def spy(self, queries, *args, **kwargs):
        if seen[-1:] == ["stop"]:
            raise KeyboardInterrupt
        seen.extend(queries)
        return plain(self, queries, *args, **kwargs)

    monkeypatch.setattr(Reader, "predict", spy)
    return seen


def test_each_text_is_read_once_until_its_label_is_damaged_or_another_labelers(
    labeler, tmp_path, read, monkeypatch
):
    def label(texts, folder, home=labeler):
        read.clear()
        return label_texts(open_labeler(home), texts, folder, device="cpu")

    asked, kept = [*TEXTS[:3], "stop", *TEXTS[3:]], tmp_path / "kept"
    with monkeypatch.context() as patch:
        patch.setattr(consistency, "_SAVED_EVERY", 2)
        with pytest.raises(KeyboardInterrupt):
            label(asked, kept)
    assert read == asked[:4]
    found = label(asked, kept)
    assert read == asked[4:]
    assert label(asked, tmp_path / "whole") == found
    (path,) = kept.glob("*.jsonl")
    path.write_text(path.read_text().replace("0.", "0.0", 1))
    assert label(asked, kept) == found
    assert (kept / f"{path.name}.damaged").is_file()
    other = shutil.copytree(labeler, tmp_path / "other")
    (other / "reader/pgra.json").unlink()
    write_record(other / "reader", replace(RECORD, seed=9))
    label(asked[:1], kept, other)
    assert read == asked[:1]


def test_a_grid_gives_its_labeler_its_rows_and_its_baseline(labeler, tmp_path):
    grid, points = tmp_path / "grid", []
    evidence = {"plain": [], "fid": TEXTS[:2], "pgra": TEXTS[2:4]}
    for method, texts in evidence.items():
        name, folders = method.upper(), {str(seed): f"{method}/seed-{seed}" for seed in (0, 1)}
        told = {"name": name, "task": "reviews", "values": {"method": method}}
        points.append({**told, "seeds": folders})
        for seed in (0,) if method == "pgra" else (0, 1):
            write_run(grid / folders[str(seed)], [texts] * 3, seed=seed, method=method)
    shutil.copytree(labeler / "reader", grid / "plain/seed-0/reader")
    values = {"title": "mine", "axes": ["method"], "baseline": {"method": "fid"}, "points": points}
    write_sealed(grid / "grid.json", {**values, "reference": None})
    found = report_consistency([grid], tmp_path / "out", **QUIET)
    assert [run.name for run in found] == ["FID", "PGRA"]
    with pytest.raises(ConfigError, match="two labelers are of one task"):
        report_consistency([grid], tmp_path / "out", labelers=[labeler, labeler], **QUIET)
    assert "difference to FID" in (tmp_path / "out/consistency.md").read_text()


def test_a_pseudo_label_is_what_the_reader_says_of_the_text_alone(labeler, runs, tmp_path):
    found = report_consistency(runs, tmp_path / "out", labelers=[labeler], **QUIET)
    reader = Reader.load(labeler, device="cpu")
    said = {text: reader.predict([text])[0].label for text in TEXTS}
    for run in found:
        shares = []
        for line in load_run(tmp_path / run.name).predictions:
            own = [said[seen["text"]] for seen in line["evidence"]]
            shares.append(own.count(line["label"]) / len(own))
        assert run.shares.tolist() == pytest.approx(shares)
    assert len({run.score for run in found}) > 1  # the control
