"""Models, corpora and data sets by hub id, through the real clients and a hub on loopback."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SENTENCES
from hub_client import TEXT
from loopback_hub import BOT, LoopbackHub, Repo, commit_of, read_folder

from pgra.encoders.encoder import Encoder
from pgra.lm.causal_lm import CausalLM
from pgra.reader.fid import FusionReader

ROOT = Path(__file__).parents[2]
OLD = {"config.json": b"{}", "pytorch_model.bin": b"old"}
CONVERTED = {**OLD, "model.safetensors": b"new"}
OPEN_REQUEST = {1: {"author": BOT, "status": "open"}}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


class Told(NamedTuple):
    """What a client said: one answer for each question, and its log."""

    answers: list
    log: str


def ask(folder, endpoint, *questions, **environment):
    """Ask in a new process, whose cache is in `folder`."""
    hidden = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
    called = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hub_client.py"), json.dumps(questions)],
        cwd=folder,
        env={**kept, "PYTHONPATH": paths, "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint}
        | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert called.returncode == 0, called.stderr
    return Told(json.loads(called.stdout), called.stderr)


BOTS, CLOSED = OPEN_REQUEST[1], {"author": BOT, "status": "closed"}
REVISIONS = {
    "refs/pr/7": CONVERTED,
    "v1.0": {**CONVERTED, "a": b""},
    "b": {**CONVERTED, "b": b""},
}
NO_WEIGHTS = {  # pull requests, and the files of the first
    "none": ({}, CONVERTED),
    "closed": ({1: CLOSED}, CONVERTED),
    "not-the-bots": ({1: {**BOTS, "author": "anyone"}}, CONVERTED),
    "without-weights": ({1: BOTS}, {**OLD, "README.md": b""}),
    "weights-elsewhere": ({1: BOTS}, {**OLD, "onnx/model.safetensors": b""}),
}
MODELS = {
    "bots": Repo({"main": OLD, "refs/pr/1": CONVERTED}, OPEN_REQUEST),
    "main": Repo({"main": CONVERTED, "refs/pr/1": {**CONVERTED, "more": b""}}, OPEN_REQUEST),
    "tagged": Repo({"main": {**CONVERTED, "README.md": b""}, **REVISIONS}),
    "gated": Repo({"main": CONVERTED}, is_gated=True),
    **{
        name: Repo({"main": OLD, "refs/pr/1": files}, pulls)
        for name, (pulls, files) in NO_WEIGHTS.items()
    },
}
NO_FOLDER = "ModelError: cannot find model '{name}': it is no folder here"
FOUND = {
    "some/bots": CONVERTED,
    "some/main": CONVERTED,
    "some/tagged@refs/pr/7": REVISIONS["refs/pr/7"],
    "some/tagged@v1.0": REVISIONS["v1.0"],
    f"some/tagged@{commit_of(REVISIONS['b'])}": REVISIONS["b"],
}
REFUSED = {
    "some/bots@main": ("has no safetensors",),  # a revision that was asked for is not replaced
    **{
        f"some/{name}": ("has no safetensors, the only", f"{name}@refs/pr/N", "save_pretrained")
        for name in NO_WEIGHTS
    },
    "no/such": (NO_FOLDER, "Repository Not Found for url"),
    "some/gated": (NO_FOLDER, "Cannot access gated repo"),
    "some/gated@v9": (NO_FOLDER, "Revision Not Found"),
    "a/b/c": (NO_FOLDER, "Repo id must be"),
}


def test_weights_are_those_of_the_revision_of_main_or_of_the_bots_pull_request(tmp_path):
    hub = LoopbackHub({f"models/some/{name}": repo for name, repo in MODELS.items()})
    with hub.serve() as endpoint:
        told = ask(tmp_path, endpoint, *(["commit", name] for name in [*FOUND, *REFUSED]))
    answers = dict(zip([*FOUND, *REFUSED], told.answers, strict=True))
    assert {name: answers[name] for name in FOUND} == {n: commit_of(f) for n, f in FOUND.items()}
    for name, parts in REFUSED.items():
        error = answers[name]["error"]
        assert all(part.format(name=name) in error for part in parts)
        assert error.startswith("ModelError: ")
        assert "\n" not in error
    assert "its main branch has no safetensors; those of the hub's bot are loaded" in told.log
    assert "(refs/pr/1)" in told.log
    hub = LoopbackHub({"models/some/main": MODELS["main"]})
    with hub.serve() as endpoint:  # when cached it costs one request
        assert ask(tmp_path, endpoint, ["commit", "some/main"]).answers == [answers["some/main"]]
    assert hub.requests == ["GET /api/models/some/main/revision/main"]


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["down", "offline"])
def test_nothing_cached_and_no_connection_names_the_ways_out(tmp_path, environment):
    told = ask(tmp_path, NOWHERE, ["commit", "some/opt"], **environment)
    error = told.answers[0]["error"]
    assert "cannot find model 'some/opt'" in error
    assert "bundled: name" in error
    assert ("offline mode" if environment else "refused") in error


def test_offline_the_cache_is_read_as_the_hub_was_last_seen(tmp_path):
    first, second, third = ({**CONVERTED, "README.md": text} for text in (b"1", b"2", b"3"))
    with LoopbackHub({"models/some/opt": Repo({"main": first})}).serve() as endpoint:
        ask(tmp_path, endpoint, ["weights", "some/opt"])
    bots = Repo({**MODELS["bots"].revisions, "branch": third}, OPEN_REQUEST)
    moved = Repo({"main": second, "refs/pr/3": third})  # the main branch has moved on
    later = f"some/bots@{commit_of(third)}"
    names = ["some/opt", "some/opt@refs/pr/3", "some/bots", later]
    with LoopbackHub({"models/some/opt": moved, "models/some/bots": bots}).serve() as endpoint:
        ask(tmp_path, endpoint, *(["weights", name] for name in names))
    old = commit_of(first)
    names += [f"some/opt@{old}", f"some/opt@{old[:8]}", "some/opt@v9", "other/opt"]
    questions = (["commit", name] for name in names)
    told = ask(tmp_path, NOWHERE, *questions, HF_HUB_OFFLINE="1")
    # The bot's pull request is preferred to a later commit.
    expected = [commit_of(files) for files in (second, third, CONVERTED, third)]
    assert told.answers[:6] == [*expected, old, old]
    assert all("cannot find model" in answer["error"] for answer in told.answers[6:])


def convertible(folder):
    """A model as it was before safetensors, with the bot's pull request."""
    files = read_folder(folder)
    old = {name: data for name, data in files.items() if name != "model.safetensors"}
    main = {**old, "pytorch_model.bin": b"never read"}
    return Repo({"main": main, "refs/pr/1": {**files, **main}}, OPEN_REQUEST)


SCRIPT = b"raise SystemExit('code of a hub was run')"


def questions_parquet(labels):
    """One split of CogComp/trec as the hub converts it: integers, whose names it states."""
    from datasets import ClassLabel, Dataset, Features, Value

    names = ClassLabel(names=["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"])
    features = Features({"text": Value("string"), "coarse_label": names})
    rows = {"text": [f"Question {i} ?" for i in range(len(labels))], "coarse_label": labels}
    file = io.BytesIO()
    Dataset.from_dict(rows, features=features).to_parquet(file)
    return file.getvalue()


def reviews_jsonl(words):
    rows = [{"text": f"A {word} film.", "label": 0, "label_text": label} for word, label in words]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def whole_hub(lm_dirs, encoder_dirs, t5_dirs):
    bert = read_folder(encoder_dirs["bert"])
    cls = {"1_Pooling/config.json": json.dumps({"pooling_mode_cls_token": True}).encode()}
    parquet = {
        "default/train/0000.parquet": questions_parquet([0, 1]),
        "default/test/0000.parquet": questions_parquet([3, 2]),
    }
    reviews = {
        f"{name}.jsonl": reviews_jsonl([(name, "positive"), ("dull", "negative")])
        for name in ("train", "dev", "test")
    }
    texts = {"file.txt": "\n".join(SENTENCES).encode()}
    return LoopbackHub(
        {
            "models/facebook/opt-tiny": convertible(lm_dirs["opt"]),
            "models/some/bert": Repo({"main": {**bert, **cls}}),
            "models/some/plain-bert": Repo({"main": bert}),
            "models/some/t5": Repo({"main": read_folder(t5_dirs["t5"])}),
            "datasets/owner/texts": Repo({"main": texts}),
            "datasets/CogComp/trec": Repo(
                {"main": {"trec.py": SCRIPT}, "refs/convert/parquet": parquet}
            ),
            "datasets/SetFit/sst2": Repo({"main": reviews}),
            "datasets/SetFit/subj": Repo({"main": {"train.jsonl": b'{"text": "A fi'}}),
        }
    )


EVERYTHING = [
    *(["lm", "facebook/opt-tiny"], ["encoder", "some/bert"], ["encoder", "some/plain-bert"]),
    *(["reader", "some/t5"], ["corpus", "owner/texts/file.txt"], ["task", "trec"]),
    *(["task", "sst2"], ["corpus", "owner/texts/none.txt"], ["lm", "no/such"]),
    ["task", "subj"],
]


@pytest.fixture(scope="module")
def online(whole_hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    with whole_hub.serve() as endpoint:
        return folder, ask(folder, endpoint, *EVERYTHING)


@pytest.mark.slow
def test_a_hub_model_is_the_model_of_its_folder(online, whole_hub, lm_dirs, encoder_dirs, t5_dirs):
    lm, cls, mean, weights = online[1].answers[:4]
    near = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu", dtype="float32")
    states = near.states_of(near.tokenize([TEXT]))
    assert lm["state"] == pytest.approx(states[0].tolist(), abs=1e-6)
    commit = commit_of(whole_hub.repos["models/facebook/opt-tiny"].revisions["refs/pr/1"])
    assert lm["fingerprint"]["model"] == f"facebook/opt-tiny@{commit}"
    for found, pooling in ((cls, "cls"), (mean, "mean")):
        assert found["fingerprint"]["pooling"] == pooling
        encoder = Encoder.from_name(str(encoder_dirs["bert"]), pooling=pooling, device="cpu")
        assert found["vector"] == pytest.approx(encoder.encode([TEXT])[0].tolist(), abs=1e-6)
    assert cls["vector"] != pytest.approx(mean["vector"], abs=1e-3)
    reader = FusionReader.from_name(str(t5_dirs["t5"]))
    sums = {name: float(w.detach().abs().sum()) for name, w in reader.named_parameters()}
    assert weights == pytest.approx(sums)


@pytest.mark.slow
def test_corpora_and_task_data_come_from_the_hub(online):
    corpus, trec, sst2, no_file, no_model, damaged = online[1].answers[4:]
    assert corpus == SENTENCES
    assert trec == [["Question 0 ?", "human"], ["Question 1 ?", "description"]]
    assert sst2 == [["A dev film.", "positive"], ["A dull film.", "negative"]]
    assert no_file["error"].startswith("DataError: cannot find corpus 'owner/texts/none.txt'")
    assert "Entry Not Found" in no_file["error"]
    assert "Repository Not Found" in no_model["error"]
    assert damaged["error"].startswith("DataError: cannot load data set")
    assert "JSON parse error" in damaged["error"]  # the cause, not that there was an error


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["down", "offline"])
def test_all_that_was_loaded_once_loads_without_the_hub(online, environment):
    folder, before = online
    # Data sets ask the hub that is down for what they have; they are read where it is told so.
    count = 7 if environment else 5
    after = ask(folder, NOWHERE, *EVERYTHING[:count], ["bars", ""], **environment)
    assert after.answers[:count] == before.answers[:count]
    assert after.answers[count] == {"download": True, "read": False}
    assert ("from the cache" if environment else "WARNING pgra.lm.load: model") in after.log
    assert "--pooling" not in after.log  # that a model has no pooling of its own is known


CARD = b"""---
configs:
- {config_name: old, data_files: [{split: train, path: old/*}]}
- config_name: new
  data_files: [{split: train, path: new/train*}, {split: test, path: new/test*}]
---
"""


def rows(*texts):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer)
    return buffer.getvalue()


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_a_corpus_and_stays_one_offline(tmp_path):
    """Two configurations, one of them in two files and two splits; or a script, never run."""
    files = {
        "README.md": CARD,
        "old/train.parquet": rows("old"),
        "new/train-00000-of-00002.parquet": rows("one", "two"),
        "new/train-00001-of-00002.parquet": rows("three", "one"),
        "new/test.parquet": rows("test"),
    }
    parquet = {"default/train/0000.parquet": rows("script")}
    scripted = {"old_set.py": SCRIPT, "README.md": b""}
    hub = LoopbackHub(
        {
            "datasets/some/wiki": Repo({"main": files}),
            "datasets/some/old_set": Repo({"main": scripted, "refs/convert/parquet": parquet}),
            "datasets/none/old_set": Repo({"main": scripted}),
        }
    )
    names = ["some/wiki:new", "some/wiki:new:test", "some/wiki:old", "some/old_set"]
    wrong = ["some/wiki:new:dev", "some/wiki:none", "some/none", "none/old_set"]
    with hub.serve() as endpoint:
        told = ask(tmp_path, endpoint, *(["corpus", name] for name in [*names, *wrong]))
    assert told.answers[:4] == [["one", "two", "three"], ["test"], ["old"], ["script"]]
    assert "read from refs/convert/parquet" in told.log
    errors = [answer["error"] for answer in told.answers[4:]]
    assert "has no split 'dev' (it has train, test): name one" in errors[0]
    for name, error in zip(wrong[1:], errors[1:], strict=True):
        assert f"cannot find corpus '{name}'" in error
        assert "\n" not in error
    made = sorted(path.name for path in (tmp_path / "artifacts" / "corpora").iterdir())
    again = ask(tmp_path, NOWHERE, *(["corpus", name] for name in names), HF_HUB_OFFLINE="1")
    assert again.answers == told.answers[:4]
    assert sorted(path.name for path in (tmp_path / "artifacts" / "corpora").iterdir()) == made
