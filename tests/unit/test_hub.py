"""Models, corpora and data sets by hub id, through the real clients and a hub on loopback."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SENTENCES
from hub_client import TEXT
from huggingface_hub import constants, hf_hub_download
from loopback_hub import BOT, LoopbackHub, Repo, commit_of, read_folder

from pgra.encoders.encoder import Encoder
from pgra.errors import ModelError
from pgra.lm import load
from pgra.lm.causal_lm import CausalLM
from pgra.reader.fid import FusionReader

ROOT = Path(__file__).parents[2]
OLD = {"config.json": b"{}", "pytorch_model.bin": b"old"}
CONVERTED = {**OLD, "model.safetensors": b"new"}
OPEN_REQUEST = {1: {"author": BOT, "status": "open"}}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens
REVISIONS = {
    "refs/pr/7": CONVERTED,
    "v1.0": {**CONVERTED, "a": b""},
    "b": {**CONVERTED, "b": b""},
}
NO_WEIGHTS = {  # pull requests, and the files of the first
    "none": ({}, CONVERTED),
    "closed": ({1: {"author": BOT, "status": "closed"}}, CONVERTED),
    "not-the-bots": ({1: {"author": "anyone", "status": "open"}}, CONVERTED),
    "without-weights": (OPEN_REQUEST, {**OLD, "README.md": b""}),
    "weights-elsewhere": (OPEN_REQUEST, {**OLD, "onnx/model.safetensors": b""}),
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
FOUND = {
    "some/bots": CONVERTED,
    "some/main": CONVERTED,
    "some/tagged@refs/pr/7": REVISIONS["refs/pr/7"],
    "some/tagged@v1.0": REVISIONS["v1.0"],
    f"some/tagged@{commit_of(REVISIONS['b'])}": REVISIONS["b"],
}
NO_FOLDER = "cannot find model '{name}': it is no folder here"
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


@pytest.fixture
def find_at(monkeypatch, tmp_path):
    """Find commits at an address: this process's client, with a cache and no memory of its own."""
    monkeypatch.setattr(load, "_find_on_hub", load._find_on_hub.__wrapped__)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")

    def find_at(endpoint, *names, is_offline=False):
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        found = []
        for name in names:
            try:
                found.append(load.find_model(name).revision)
            except ModelError as error:
                found.append(str(error))
        return found

    return find_at


def test_weights_are_those_of_the_revision_of_main_or_of_the_bots_pull_request(find_at, caplog):
    caplog.set_level("INFO")
    hub = LoopbackHub({f"models/some/{name}": repo for name, repo in MODELS.items()})
    with hub.serve() as endpoint:
        commits = [commit_of(files) for files in FOUND.values()]
        assert find_at(endpoint, *FOUND) == commits
        errors = find_at(endpoint, *REFUSED)
        hub.requests.clear()
        assert find_at(endpoint, "some/main") == [commits[1]]  # when cached it costs one request
        assert hub.requests == ["GET /api/models/some/main/revision/main"]
    for (name, parts), error in zip(REFUSED.items(), errors, strict=True):
        assert all(part.format(name=name) in error for part in parts)
        assert "\n" not in error
    assert "no safetensors; those of the hub's bot are loaded (refs/pr/1)" in caplog.text


@pytest.mark.parametrize(("is_offline", "why"), [(False, "refused"), (True, "offline mode")])
def test_nothing_cached_and_no_connection_names_the_ways_out(find_at, is_offline, why):
    (error,) = find_at(NOWHERE, "some/opt", is_offline=is_offline)
    assert all(part in error for part in ("cannot find model 'some/opt'", "bundled: name", why))


def test_offline_the_cache_is_read_as_the_hub_was_last_seen(find_at):
    def fetch(endpoint, *names):
        for name, commit in zip(names, find_at(endpoint, *names), strict=True):
            hf_hub_download(name.partition("@")[0], "model.safetensors", revision=commit)

    first, second, third = ({**CONVERTED, "README.md": text} for text in (b"1", b"2", b"3"))
    with LoopbackHub({"models/some/opt": Repo({"main": first})}).serve() as endpoint:
        fetch(endpoint, "some/opt")
    bots = Repo({**MODELS["bots"].revisions, "branch": third}, OPEN_REQUEST)
    moved = Repo({"main": second, "refs/pr/3": third})  # the main branch has moved on
    names = ["some/opt", "some/opt@refs/pr/3", "some/bots", f"some/bots@{commit_of(third)}"]
    with LoopbackHub({"models/some/opt": moved, "models/some/bots": bots}).serve() as endpoint:
        fetch(endpoint, *names)
    old = commit_of(first)
    names += [f"some/opt@{old}", f"some/opt@{old[:8]}", "some/opt@v9", "other/opt"]
    found = find_at(NOWHERE, *names, is_offline=True)
    # The bot's pull request is preferred to a later commit.
    assert found[:4] == [commit_of(files) for files in (second, third, CONVERTED, third)]
    assert found[4:6] == [old, old]
    assert all("cannot find model" in error for error in found[6:])


# All clients, each time in a new process, which has a hub or none.


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


def parquet(*texts):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer)
    return buffer.getvalue()


def questions_parquet(labels):
    """One split of CogComp/trec as the hub converts it: integers, whose names it states."""
    from datasets import ClassLabel, Dataset, Features, Value

    names = ClassLabel(names=["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"])
    features = Features({"text": Value("string"), "coarse_label": names})
    rows = {"text": [f"Question {i} ?" for i in range(len(labels))], "coarse_label": labels}
    file = io.BytesIO()
    Dataset.from_dict(rows, features=features).to_parquet(file)
    return file.getvalue()


SCRIPT = b"raise SystemExit('code of a hub was run')"
CARD = b"""---
configs:
- {config_name: old, data_files: [{split: train, path: old/*}]}
- config_name: new
  data_files: [{split: train, path: new/train*}, {split: test, path: new/test*}]
---
"""
WIKI = {  # two configurations, one of them in two files and two splits
    "README.md": CARD,
    "old/train.parquet": parquet("old"),
    "new/train-00000-of-00002.parquet": parquet("one", "two"),
    "new/train-00001-of-00002.parquet": parquet("three", "one"),
    "new/test.parquet": parquet("test"),
}
REVIEW = '{"text": "A %s film.", "label": 0, "label_text": "%s"}\n'


@pytest.fixture(scope="module")
def whole_hub(lm_dirs, encoder_dirs, t5_dirs):
    bert, opt = read_folder(encoder_dirs["bert"]), read_folder(lm_dirs["opt"])
    old = {name: data for name, data in opt.items() if name != "model.safetensors"}
    old["pytorch_model.bin"] = b"never read"
    cls = {"1_Pooling/config.json": json.dumps({"pooling_mode_cls_token": True}).encode()}
    trec = {
        "default/train/0000.parquet": questions_parquet([0, 1]),
        "default/test/0000.parquet": questions_parquet([3, 2]),
    }
    sst2 = {
        f"{name}.jsonl": (REVIEW % (name, "positive") + REVIEW % ("dull", "negative")).encode()
        for name in ("train", "dev", "test")
    }
    scripted = {"old_set.py": SCRIPT, "README.md": b""}
    converted = {"default/train/0000.parquet": parquet("script")}
    revisions = {
        "models/some/bert": {"main": {**bert, **cls}},
        "models/some/plain-bert": {"main": bert},
        "models/some/t5": {"main": read_folder(t5_dirs["t5"])},
        "datasets/owner/texts": {"main": {"file.txt": "\n".join(SENTENCES).encode()}},
        "datasets/CogComp/trec": {"main": {"trec.py": SCRIPT}, "refs/convert/parquet": trec},
        "datasets/SetFit/sst2": {"main": sst2},
        "datasets/SetFit/subj": {"main": {"train.jsonl": b'{"text": "A fi'}},
        "datasets/some/wiki": {"main": WIKI},
        "datasets/some/old_set": {"main": scripted, "refs/convert/parquet": converted},
        "datasets/none/old_set": {"main": scripted},
    }
    repos = {name: Repo(files) for name, files in revisions.items()}
    repos["models/facebook/opt-tiny"] = Repo({"main": old, "refs/pr/1": opt | old}, OPEN_REQUEST)
    return LoopbackHub(repos)


FILES = [
    *(["lm", "facebook/opt-tiny"], ["encoder", "some/bert"], ["encoder", "some/plain-bert"]),
    *(["reader", "some/t5"], ["corpus", "owner/texts/file.txt"]),
]
SETS = [
    *(["task", "trec"], ["task", "sst2"], ["corpus", "some/wiki:new"]),
    *(["corpus", "some/wiki:new:test"], ["corpus", "some/wiki:old"], ["corpus", "some/old_set"]),
]
FAILED = {
    "owner/texts/none.txt": "DataError: cannot find corpus '{name}'.*Entry Not Found",
    "some/wiki:new:dev": r"has no split 'dev' \(it has train, test\): name one",
    **dict.fromkeys(("some/wiki:none", "some/none", "none/old_set"), "cannot find corpus '{name}'"),
}


@pytest.fixture(scope="module")
def online(whole_hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    wrong = [["task", "subj"], *(["corpus", name] for name in FAILED)]
    with whole_hub.serve() as endpoint:
        return folder, ask(folder, endpoint, *FILES, *SETS, *wrong)


@pytest.mark.slow
def test_a_hub_model_is_the_model_of_its_folder(online, whole_hub, lm_dirs, encoder_dirs, t5_dirs):
    lm, cls, mean, weights = online[1].answers[:4]
    near = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu", dtype="float32")
    states = near.states_of(near.tokenize([TEXT]))
    assert lm["state"] == pytest.approx(states[0].tolist(), abs=1e-6)
    commit = commit_of(whole_hub.files("facebook/opt-tiny", "refs/pr/1"))
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
    """Those of a script are the hub's own conversion: its code is never run."""
    corpus, trec, sst2, *sets = online[1].answers[4:11]
    assert corpus == SENTENCES
    assert trec == [["Question 0 ?", "human"], ["Question 1 ?", "description"]]
    assert sst2 == [["A dev film.", "positive"], ["A dull film.", "negative"]]
    assert sets == [["one", "two", "three"], ["test"], ["old"], ["script"]]
    assert "read from refs/convert/parquet" in online[1].log
    damaged, *errors = (answer["error"] for answer in online[1].answers[11:])
    assert damaged.startswith("DataError: cannot load data set")
    assert "JSON parse error" in damaged  # the cause, not that there was an error
    for (name, told), error in zip(FAILED.items(), errors, strict=True):
        assert re.search(told.format(name=name), error)
        assert "\n" not in error


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["down", "offline"])
def test_all_that_was_loaded_once_loads_without_the_hub(online, environment):
    folder, before = online
    made = sorted(path.name for path in (folder / "artifacts" / "corpora").iterdir())
    # Data sets ask the hub that is down for what they have; they are read where it is told so.
    questions = [*FILES, *(SETS if environment else [])]
    after = ask(folder, NOWHERE, *questions, ["bars", ""], **environment)
    assert after.answers[:-1] == before.answers[: len(questions)]
    assert after.answers[-1] == {"download": True, "read": False}
    assert ("from the cache" if environment else "WARNING pgra.lm.load: model") in after.log
    assert "--pooling" not in after.log  # that a model has no pooling of its own is known
    assert sorted(path.name for path in (folder / "artifacts" / "corpora").iterdir()) == made
