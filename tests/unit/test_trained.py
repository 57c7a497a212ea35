"""A trained reader's folder, used alone."""

import math
import shutil

import numpy as np
import pytest
from small_training import lively

from pgra.artifacts import read_sealed, write_sealed
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts import FewShotPrompt, PromptTemplate
from pgra.reader.calibration import Calibration
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SegmentLayout, build_inputs
from pgra.reader.predict import T5Classifier
from pgra.reader.record import Reader, ReaderRecord, read_record, write_record
from pgra.types import Example

RECORD = ReaderRecord(
    task="reviews",
    inputs=("text", "title"),
    words={"negative": "terrible", "positive": "great"},
    layout=SegmentLayout("{title} {text} It was <extra_id_0> .", "evidence_first", 40),
    decode="verbalizer",
    calibration=Calibration(2.5, 60),
    num_evidence=2,
    method="pgra",
    has_own_inputs=False,
    prompt=FewShotPrompt(PromptTemplate("{text}", "Answer:", ("text", "title")), "Do:", ("t-1",)),
    seed=3,
    arguments={"runtime": {"artifacts_dir": "artifacts", "device": "cpu"}},
    fingerprints={"corpus": "cd"},
)
QUERIES = ["the red sea", {"text": "a film", "title": "plot"}, "an old house by the sea"]
EVIDENCE = [["apples grow in the garden", "a cast"], [], ["the boats"]]


@pytest.fixture(scope="module")
def made(t5_dir, tmp_path_factory):
    model, folder = lively(t5_dir), tmp_path_factory.mktemp("run") / "reader"
    T5Classifier(model, load_tokenizer(find_model(str(t5_dir))), RECORD.verbalizer).save(folder)
    write_record(folder, RECORD)
    return folder


@pytest.fixture(scope="module")
def reader(made, tmp_path_factory):
    """Loaded from another place than where it was written."""
    moved = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(made, moved)
    return Reader.load(moved, device="cpu")


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made, tmp_path / "reader")


def chances(found):
    return [list(prediction.scores.values()) for prediction in found]


def test_a_loaded_reader_decides_as_its_parts(made, reader):
    assert read_record(made) == read_record(made.parent) == reader.record == RECORD
    model, tokenizer = (
        FusionReader.from_source(find_model(str(made))),
        load_tokenizer(find_model(str(made))),
    )
    fields = [{"text": "the red sea", "title": ""}, QUERIES[1], {"text": QUERIES[2], "title": ""}]
    examples = [Example(f"query-{i}", f) for i, f in enumerate(fields)]
    verbalizer = RECORD.verbalizer
    inputs = build_inputs(examples, EVIDENCE, tokenizer, verbalizer, layout=RECORD.layout)
    warm = T5Classifier(model, tokenizer, verbalizer, calibration=Calibration(2.5))
    expected = warm.predict(inputs)
    assert reader.predict(QUERIES, EVIDENCE) == expected
    cold = T5Classifier(model, tokenizer, verbalizer).predict(inputs)
    assert [p.label for p in cold] == [p.label for p in expected]  # no decision changes,
    assert np.abs(np.subtract(chances(cold), chances(expected))).max() > 1e-3  # probabilities do


@pytest.mark.parametrize("texts", [[None], [math.nan], "red", ["\udc80"]])
def test_evidence_that_is_no_list_of_texts_is_refused(reader, texts):
    with pytest.raises(DataError, match="evidence"):
        reader.predict(QUERIES[:1], [texts])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("layout", [f"{{text{odd}}}" for odd in (".__class__", "!r", ":>999999999", "s", "[0]")]),
        ("calibration", [0.0, -1.0]),
    ],
)
def test_a_strangers_template_and_temperature_are_checked(copy, field, values):
    path = copy / "pgra.json"
    record = read_sealed(path)
    name = {"layout": "template", "calibration": "temperature"}[field]
    for value in values:
        changed = {**record, field: {**record[field], name: value}}
        write_sealed(path, changed)
        with pytest.raises((ConfigError, ArtifactError), match=name):
            read_record(copy)
    write_sealed(path, record)  # the control
    read_record(copy)
