"""`pgra.train`: the command's run from Python, of rows in memory, and what is done with it."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
from conftest import SENTENCES, contents, review_rows
from loopback import TOKEN, LoopbackHub, Repo, point_client
from scripted import call, read_json

import pgra
from pgra.commands.predict import main as predict_main
from pgra.commands.train import evaluate as evaluate_main
from pgra.errors import PgraError

TRAIN, TEST = review_rows(40), review_rows(12, start=20)
TEXTS = ["A warm film by the sea.", "A dull story."]
_ROWS = {"train": TRAIN, "test": TEST}
_FILES = ("task", "train_file", "test_file", "corpus", "seed")


def flags(bench, **changes):
    """The bench's flags as Python has them, without those that name data."""
    own = {name: value for name, value in bench.flags.items() if name not in _FILES}
    return {**own, "seed": 1, **changes}


def make(bench, name, **changes):
    data = {"task": "sst2", **_ROWS, "corpus": SENTENCES}
    return pgra.train(**{**data, **flags(bench), "output_dir": bench.run(name), **changes})


@pytest.fixture(scope="module")
def ours(bench):
    return make(bench, "ours")


def test_it_is_the_run_that_the_command_makes(bench, ours):
    bench.make("commands")
    theirs, folder = bench.run("commands"), ours.folder
    assert read_json(folder / "run.json") == read_json(theirs / "run.json")
    assert contents(folder)["predictions.jsonl"] == contents(theirs)["predictions.jsonl"]
    assert ours.metrics["value"] == bench.metrics("commands")["value"]
    assert ours.predictions == bench.predictions("commands")
    assert ours.training["value"] == read_json(theirs / "training.json")["value"]
    other = make(bench, "seed", seed=2)  # the control
    assert other.predictions != ours.predictions


def test_all_shapes_of_rows_are_one_run_that_is_taken_up(bench, ours):
    before = contents(ours.folder)
    pairs = {split: [(r["text"], r["label"]) for r in rows] for split, rows in _ROWS.items()}
    numbers = {
        split: [{"text": r["text"], "label": int(r["label"] == "positive")} for r in rows]
        for split, rows in _ROWS.items()
    }
    names = datasets.ClassLabel(names=["negative", "positive"])
    sets = {split: datasets.Dataset.from_list(rows) for split, rows in numbers.items()}
    coded = {split: rows.cast_column("label", names) for split, rows in sets.items()}
    files = {"train": bench.train_file, "test": str(bench.test_file)}
    texts = datasets.Dataset.from_dict({"text": SENTENCES})
    for data in (pairs, coded, files):  # numbers are places in a column of classes
        again = make(bench, "ours", **data, corpus=texts if data is coded else bench.corpus)
        assert again.metrics == ours.metrics
    with pytest.raises(PgraError, match="unknown label '[01]'"):  # and of others names
        make(bench, "ours", **numbers)
    assert contents(ours.folder) == before
    turned = [{**row, "label": names.int2str(1 - row["label"])} for row in numbers["train"]]
    with pytest.raises(PgraError, match="choose another"):  # other rows are another run
        make(bench, "ours", train=turned)


def test_an_index_gives_corpus_encoder_and_its_own_folder(bench, ours, tmp_path):
    without = {**flags(bench), "encoder": None}
    del without["encoder"]
    for path in (tmp_path / "index", None):
        index = pgra.Index.build(SENTENCES, encoder=bench.encoder, path=path)
        name = "indexed" if path else "temporary"
        run = pgra.train("sst2", **_ROWS, corpus=index, output_dir=bench.run(name), **without)
        assert run.predictions == ours.predictions
        folder = read_json(run.folder / "arguments.json")["retriever"]["index_dir"]
        del index
        assert run.predict(TEXTS[0]).scores == ours.predict(TEXTS[0]).scores
        assert folder.startswith(str(path or bench.artifacts / "given"))
    corpus = pgra.open_corpus(bench.corpus, tmp_path / "read")
    assert make(bench, "indexed2", corpus=corpus).predictions == ours.predictions


def test_a_loaded_run_gives_new_texts_what_the_command_gives(bench, ours):
    words = [*TEXTS, "--run", str(ours.folder), "--device", "cpu", "--json"]
    told = [json.loads(line) for line in call(predict_main, words).out.splitlines()]
    found = ours.predict(TEXTS)
    assert [answer.scores for answer in found] == [line["scores"] for line in told]
    assert [answer.label for answer in found] == [line["prediction"] for line in told]
    assert [e.text for e in found[0].evidence] == [e["text"] for e in told[0]["evidence"]]
    one = ours.predict(TEXTS[0])
    assert one.label == found[0].label
    rows = datasets.Dataset.from_list([{"text": text, "label": "negative"} for text in TEXTS])
    assert [answer.scores for answer in ours.predict(rows)] == [a.scores for a in found]
    assert pgra.Predictor.open(str(ours.folder)).answer(TEXTS)[0].scores == found[0].scores
    again = pgra.Run.open(str(ours.folder))
    assert again.predict({"text": TEXTS[0], "other": 1}).scores == one.scores
    assert "sst2 test accuracy" in repr(again)
    for wrong, error in {"": "query 0 is empty", 3: "queries is 3: give a text"}.items():
        with pytest.raises(PgraError, match=error):
            ours.predict(wrong)
    with pytest.raises(PgraError, match="query 1 is a int"):
        ours.predict([TEXTS[0], 3])
    with pytest.raises(PgraError, match="query 0 has no 'text'"):
        ours.predict({"txt": "a"})


def test_the_commands_read_its_folder(ours):
    words = ["--run", str(ours.folder), "--device", "cpu"]
    before = ours.metrics
    assert call(evaluate_main, words).code == 0
    after = ours.metrics
    assert (after["value"], after["fingerprints"]) == (before["value"], before["fingerprints"])


def test_a_method_without_training_and_a_task_without_a_file(bench, tmp_path):
    task = pgra.Task(
        name="mine",
        labels=["negative", "positive"],
        prompt="How is it?\n{text}",
        reader_template="{text} <extra_id_0>",
        verbalizer={"negative": "bad", "positive": "good"},
    )
    common = {"artifacts_dir": tmp_path / "made", "lm": bench.lm, "device": "cpu"}
    where = {"output_dir": tmp_path / "{task}-{method}"}
    run = pgra.train(task, TRAIN, method="icl", num_exemplars=2, **common, **where)
    assert run.folder == tmp_path / "mine-icl"
    assert run.metrics["n"] == 8  # a fifth of train
    assert any("held out since no test file" in note for note in run.metrics["notes"])
    assert run.predict(TEXTS[0]).label in ("negative", "positive")
    assert pgra.Task.load(run.args.data.task) == task
    for what in (lambda: run.reader, lambda: run.push_to_hub("me/x")):
        with pytest.raises(PgraError, match="is for trained readers, and method 'icl' trains none"):
            what()
    voted = pgra.train(
        task,
        TRAIN,
        test=TEST,
        method="knn",
        encoder=bench.encoder,
        **where,
        artifacts_dir=common["artifacts_dir"],
        device="cpu",
        num_neighbors=3,
    )
    assert voted.metrics["n"] == 12


WRONG = {
    "num_candidats": (
        {"num_candidats": 6},
        "unknown argument 'num_candidats'. Did you mean",
    ),
    "type": ({"max_steps": "50"}, "pgra.train: max_steps is '50'; it must be a whole number"),
    "kind": ({"num_candidates": [6]}, "num_candidates is [6]; it must be a whole number"),
    "range": ({"num_candidates": 0}, "num_candidates is 0: it must be at least 1"),
    "none": ({"lm": None}, "lm is None; it must be text"),
    "method": ({"method": "pgr"}, "unknown method 'pgr'. Did you mean 'pgra'?"),
    "option": ({"cross_encoder": "x"}, "cross_encoder is an argument of --reranker"),
    "contradiction": (
        {"method": "fid", "reranker": "prompted"},
        "reranker is prompted, and method",
    ),
    "task": ({"task": 3}, "task is 3: give a name"),
    "sst3": ({"task": "sst3"}, "unknown task 'sst3'. Did you mean"),
    "label": ({"train": [("a", "positiv")]}, "train, row 0: unknown label 'positiv'. Did you mean"),
    "column": ({"test": [{"txt": "a", "label": 1}]}, "test, row 0: no column 'text'. Did you mean"),
    "row": ({"train": ["a text"]}, "train, row 0 is a str ('a text'): give a datasets.Dataset"),
    "empty": ({"train": []}, "train is empty: give at least one row"),
    "number": ({"train": 3}, "train is a int: give a datasets.Dataset"),
    "splits": ({"train": {"train": TRAIN}}, "train is a dict of train: give one of its splits"),
    "bundled": (
        {"train": "bundled:x"},
        "give dataset_name='bundled:x'",
    ),
    "file": ({"train": "no.csv"}, "no.csv does not exist"),
    "twice": ({"train_file": "x.csv"}, "train_file is given twice"),
    "corpus": ({"method": "icl"}, "unknown argument"),
    "texts": ({"corpus": ["a", 3]}, "passages[1]: 'text' is 3, not text"),
    "seeds": ({"seeds": [1, 2]}, "unknown argument 'seeds'. Did you mean 'seed'?"),
}


def test_what_is_no_name_is_said():
    for ask in (pgra.Reader.from_pretrained, pgra.Predictor.open, pgra.Run.open):
        with pytest.raises(PgraError, match="3"):
            ask(3)
    with pytest.raises(PgraError, match="artifacts_dir is 3: give a folder"):
        pgra.train("sst2", TRAIN, artifacts_dir=3)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_line_and_writes_no_run(name, bench, tmp_path):
    changes, told = WRONG[name]
    given = {"artifacts_dir": tmp_path / "made", **changes}
    with pytest.raises((PgraError, ValueError), match=re.escape(told)) as error:
        make(bench, "wrong", **given)
    assert "\n" not in str(error.value)
    assert not bench.run("wrong").exists()


# The way back from the hub.


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = LoopbackHub()
    with hub.serve() as endpoint:
        point_client(monkeypatch, endpoint, tmp_path / "hub")
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        hub.endpoint = endpoint
        yield hub


def test_a_pushed_reader_comes_back_by_its_id(ours, hub, tmp_path, monkeypatch):
    assert "me/name" in ours.push_to_hub("me/name", token=TOKEN)
    local = ours.reader
    reader = pgra.Reader.from_pretrained("me/name", device="cpu")
    evidence = ["A warm and funny portrait."]
    assert reader(TEXTS[0], evidence) == local(TEXTS[0], evidence)
    assert reader(TEXTS[0], evidence) == local.predict([TEXTS[0]], [evidence])[0]
    assert reader(TEXTS[0], []) != reader(TEXTS[0], evidence)  # the control
    saved = reader.save_pretrained(tmp_path / "saved")
    there, here = contents(saved), contents(ours.folder / "reader")
    there.pop(".gitattributes", None)
    records = [json.loads(files.pop("pgra.json")) for files in (there, here)]
    assert there == here
    differing = {name for name in records[0] if records[0][name] != records[1][name]}
    assert "digest" in differing <= {"arguments", "base_model", "fingerprints", "digest"}
    assert str(tmp_path.parent) not in json.dumps(records[0])  # no folder of this machine
    assert str(tmp_path.parent) in json.dumps(records[1])  # the control
    assert pgra.Reader.from_pretrained(saved)(TEXTS[0], evidence) == local(TEXTS[0], evidence)
    with pytest.raises(PgraError, match="holds something else"):
        reader.save_pretrained(ours.folder)
    asked = [TEXTS[0], "--run", "me/name", "--device", "cpu", "--json"]
    assert "came from the hub without its corpus" in call(predict_main, asked).error
    here = tmp_path / "here"  # what it was made with, under the same names
    here.mkdir()
    for name in set(re.findall(r'"(/[^"]+)"', json.dumps(records[1]["arguments"]))):
        if Path(name).exists() and Path(name) != ours.folder:
            (here / Path(name).name).symlink_to(name)
    monkeypatch.chdir(here)
    told = call(predict_main, asked)
    assert told.code == 0, told.err
    assert json.loads(told.out)["scores"] == ours.predict(TEXTS[0]).scores
    assert (tmp_path / "cache/pgra/banks").is_dir()  # made again, in the user's cache
    point_client(monkeypatch, hub.endpoint, tmp_path / "hub", is_offline=True)
    offline = pgra.Reader.from_pretrained("me/name", device="cpu")  # from the hub's cache
    assert offline(TEXTS[0], evidence) == local(TEXTS[0], evidence)


def test_what_the_hub_has_not_is_said_in_one_line(ours, hub, tmp_path, monkeypatch):
    with pytest.raises(PgraError, match=r"cannot push to 'me/x' without a token"):
        ours.push_to_hub("me/x")
    hub.repos["models/me/plain"] = Repo({"main": {"config.json": b"{}"}})
    files = {n: d for n, d in contents(ours.folder / "reader").items() if "/" not in n}
    values = json.loads(files["pgra.json"])
    values["arguments"]["corpus"]["corpus"] = "gone/corpus.txt"
    files["pgra.json"] = json.dumps(values).encode()
    hub.repos["models/me/bare"] = Repo({"main": files})
    for name, told in {
        "me/no": "cannot find reader 'me/no': it is no folder here, and the hub says: ",
        "me/plain": "'me/plain' on the hub is no trained reader (it has no pgra.json)",
    }.items():
        with pytest.raises(PgraError, match=re.escape(told)):
            pgra.Reader.from_pretrained(name)
        assert told in call(predict_main, ["a", "--run", name]).error
    error = call(predict_main, ["a", "--run", "me/bare", "--device", "cpu"]).error
    assert "gone" in error
    assert "[the reader 'me/bare' came from the hub without its corpus" in error
    point_client(monkeypatch, hub.endpoint, tmp_path / "other", is_offline=True)
    assert "cannot find reader 'me/name'" in call(predict_main, ["a", "--run", "me/name"]).error
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
