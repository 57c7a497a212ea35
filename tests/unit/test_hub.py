"""Models, corpora and data sets by hub id, through the real clients and a hub on loopback."""

import io
import json
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SENTENCES, contents
from huggingface_hub import hf_hub_download
from loopback import BOT, TOKEN, LoopbackHub, Repo, commit_of, point_client

import pgra
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.data.examples import open_split, read_split
from pgra.data.tasks import Task
from pgra.encoders.encoder import Encoder
from pgra.errors import DamageError, PgraError
from pgra.lm import load
from pgra.lm.causal_lm import CausalLM

OLD = {"config.json": b"{}", "pytorch_model.bin": b"old"}
CONVERTED = {**OLD, "model.safetensors": b"new"}
OPEN_REQUEST = {1: {"author": BOT, "status": "open"}}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens
TAGS = {name: {**CONVERTED, name: b""} for name in ("v1.0", "b")}
NO_WEIGHTS = {  # a pull request, and its files
    "not-the-bots": ({"author": "anyone", "status": "open"}, CONVERTED),
    "weights-elsewhere": (OPEN_REQUEST[1], {**OLD, "onnx/model.safetensors": b""}),
}
MODELS = {
    "bots": Repo({"main": OLD, "refs/pr/1": CONVERTED}, OPEN_REQUEST),
    "main": Repo({"main": CONVERTED, "refs/pr/1": {**CONVERTED, "more": b""}}, OPEN_REQUEST),
    "tagged": Repo({"main": {**CONVERTED, "README.md": b""}, **TAGS}),
    "gated": Repo({"main": CONVERTED}, is_gated=True),
    **{
        name: Repo({"main": OLD, "refs/pr/1": files}, {1: pull})
        for name, (pull, files) in NO_WEIGHTS.items()
    },
}
FOUND = {
    "some/bots": CONVERTED,
    "some/main": CONVERTED,
    "some/tagged@v1.0": TAGS["v1.0"],
    f"some/tagged@{commit_of(TAGS['b'])}": TAGS["b"],
}
REFUSED = {
    "some/bots@main": "has no safetensors",  # a revision that was asked for is not replaced
    **{f"some/{name}": "has no safetensors" for name in NO_WEIGHTS},
    "no/such": "Repository Not Found for url",
    "some/gated": "Cannot access gated repo",
}


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Point this process's clients at a hub, with caches of their own and no memory of others."""
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "_find_on_hub", load._find_on_hub.__wrapped__)

    def at(endpoint, *, is_offline=False):
        point_client(monkeypatch, endpoint, tmp_path, is_offline=is_offline)
        there = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": is_offline}
        for name, value in {**there, "HF_DATASETS_CACHE": tmp_path / "sets"}.items():
            monkeypatch.setattr(datasets.config, name, value)

    return at


@pytest.fixture
def find_at(client):
    def find_at(endpoint, *names, is_offline=False):
        client(endpoint, is_offline=is_offline)
        return [told(lambda name=name: load.find_model(name).revision) for name in names]

    return find_at


def told(ask):
    """Ask, and give the error in words where there is one."""
    try:
        return ask()
    except PgraError as error:
        return str(error)


def test_weights_are_of_the_revision_main_or_the_bots_request(find_at):
    hub = LoopbackHub({f"models/some/{name}": repo for name, repo in MODELS.items()})
    with hub.serve() as endpoint:
        commits = [commit_of(files) for files in FOUND.values()]
        assert find_at(endpoint, *FOUND) == commits
        errors = find_at(endpoint, *REFUSED)
        hub.requests.clear()
        assert find_at(endpoint, "some/main") == [commits[1]]  # when cached nothing is sent again
        assert not any(request.startswith("GET /some") for request in hub.requests)
    for (name, reason), error in zip(REFUSED.items(), errors, strict=True):
        assert name in error
        assert reason in error
        assert "\n" not in error


def test_offline_the_cache_is_read_as_the_hub_was_last_seen(find_at):
    def fetch(endpoint, *names):
        for name, commit in zip(names, find_at(endpoint, *names), strict=True):
            hf_hub_download(name.partition("@")[0], "model.safetensors", revision=commit)

    first, second = ({**CONVERTED, "README.md": text} for text in (b"1", b"2"))
    with LoopbackHub({"models/some/opt": Repo({"main": first})}).serve() as endpoint:
        fetch(endpoint, "some/opt")
    repos = {"models/some/opt": Repo({"main": second}), "models/some/bots": MODELS["bots"]}
    with LoopbackHub(repos).serve() as endpoint:  # the main branch has moved on
        fetch(endpoint, "some/opt", "some/bots")
    old = commit_of(first)
    names = ["some/opt", "some/bots", f"some/opt@{old}", "some/opt@v9"]
    *found, missing = find_at(NOWHERE, *names, is_offline=True)
    assert found == [commit_of(second), commit_of(CONVERTED), old]
    assert "cannot find model" in missing
    (error,) = find_at(NOWHERE, "other/opt")
    assert "refused" in error


# Models, corpora and data sets as they are used.


def parquet(*texts, **columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts, **columns}), buffer)
    return buffer.getvalue()


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
REVIEW = b'{"text": "A %s film.", "label": 1, "label_text": "positive"}'


@pytest.fixture
def whole_hub(lm_dirs, encoder_dirs):
    bert, opt = contents(encoder_dirs["bert"]), contents(lm_dirs["opt"])
    old = {name: data for name, data in opt.items() if name != "model.safetensors"}
    old["pytorch_model.bin"] = b"never read"
    parts = [("Transformer", ""), ("Pooling", "pool")]
    kind = "sentence_transformers.models"
    modules = [{"name": k, "type": f"{kind}.{k}", "path": path} for k, path in parts]
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True}
    cls = {
        name: json.dumps(value).encode()
        for name, value in {"modules.json": modules, "pool/config.json": pooling}.items()
    }
    asked = parquet("Question 0 ?", "Question 1 ?", coarse_label=[3, 2])
    trec = {f"default/{split}/0000.parquet": asked for split in ("train", "test")}
    reviews = {f"{name}.jsonl": REVIEW % name.encode() for name in ("train", "dev", "test")}
    scripted = {"old_set.py": SCRIPT, "README.md": b""}
    revisions = {
        "models/some/bert": {"main": {**bert, **cls}},
        "datasets/owner/texts": {"main": {"file.txt": "\n".join(SENTENCES).encode()}},
        "datasets/CogComp/trec": {"main": {"trec.py": SCRIPT}, "refs/convert/parquet": trec},
        "datasets/SetFit/sst2": {"main": reviews},
        "datasets/some/wiki": {"main": WIKI},
        "datasets/none/old_set": {"main": scripted},
    }
    repos = {name: Repo(files) for name, files in revisions.items()}
    repos["models/facebook/opt-tiny"] = Repo({"main": old, "refs/pr/1": opt | old}, OPEN_REQUEST)
    return LoopbackHub(repos)


CORPORA = {"owner/texts/file.txt": SENTENCES, "some/wiki:new": ["one", "two", "three"]}
TASKS = {
    "trec": [("Question 0 ?", "human"), ("Question 1 ?", "description")],
    "sst2": [("A dev film.", "positive")],
}
FAILED = {
    "owner/texts/none.txt": "{name}",
    "some/wiki:new:dev": "'dev'",
    "none/old_set": "{name}",
}
TEXT = "The film is a warm and funny portrait."


def ask_lm(name):
    lm = CausalLM(name, device="cpu", dtype="float32")
    return lm.states_of(lm.tokenize([TEXT])).tolist(), lm.fingerprint["model"]


def ask_encoder(name, **options):
    encoder = Encoder(name, device="cpu", **options)
    return encoder.encode([TEXT]).tolist()


def ask_corpus(name, folder):
    found = open_corpus(CorpusArguments(corpus=name), folder / "artifacts")
    return found.texts(range(len(found)))


def ask_task(name):
    task = Task.load(name)
    rows = read_split(task, open_split(task, task.hub.id, "test"), "test")
    return [(example.text, example.label) for example in rows]


@pytest.mark.slow
def test_a_hub_model_loads_without_the_hub(whole_hub, client, lm_dirs, encoder_dirs):
    def ask():
        return ask_lm("facebook/opt-tiny"), ask_encoder("some/bert")

    with whole_hub.serve() as endpoint:
        client(endpoint)
        online = ask()
    (states, model), vector = online
    assert states == ask_lm(str(lm_dirs["opt"]))[0]
    commit = commit_of(whole_hub.files("facebook/opt-tiny", "refs/pr/1"))
    assert model == f"facebook/opt-tiny@{commit}"
    ways = [ask_encoder(str(encoder_dirs["bert"]), pooling=each) for each in ("cls", "mean")]
    assert [vector == way for way in ways] == [True, False]
    for is_offline in (False, True):
        client(NOWHERE, is_offline=is_offline)
        assert ask() == online


@pytest.mark.slow
def test_corpora_and_task_data_stay_there_offline(whole_hub, client, tmp_path):
    with whole_hub.serve() as endpoint:
        client(endpoint)
        assert {name: ask_corpus(name, tmp_path) for name in CORPORA} == CORPORA
        assert {name: ask_task(name) for name in TASKS} == TASKS
        for name, message in FAILED.items():
            error = told(lambda name=name: ask_corpus(name, tmp_path))
            assert re.search(message.format(name=name), error)
            assert "\n" not in error
    # Data sets ask the hub that is down for what they have; they are read where it is told so.
    client(NOWHERE, is_offline=True)
    assert {name: ask_corpus(name, tmp_path) for name in CORPORA} == CORPORA
    assert {name: ask_task(name) for name in TASKS} == TASKS


@pytest.mark.slow
def test_a_pushed_index_comes_back_by_its_id_whole(client, encoder_dirs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub, home = LoopbackHub(), tmp_path / "index"
    own = pgra.Index.build(SENTENCES, encoder=str(encoder_dirs["bert"]), path=home, device="cpu")
    hits = own.search(TEXT, k=5)
    with hub.serve() as endpoint:
        client(endpoint)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        assert "me/index" in own.push_to_hub("me/index")
        home.rename(tmp_path / "moved")
        found = pgra.Index.load("me/index", device="cpu")
        assert found.search(TEXT, k=5) == hits
        files = hub.files("me/index")
        for place in (tmp_path, encoder_dirs["bert"]):
            assert not any(str(place).encode() in data for data in files.values())
        faiss = files["indexes/index/index.faiss"]
        files["indexes/index/index.faiss"] = faiss[:-1] + bytes([faiss[-1] ^ 1])
        hub.repos["models/me/other"] = Repo({"main": files})
        with pytest.raises(DamageError, match="index.faiss"):
            pgra.Index.load("me/other", device="cpu")
    client(NOWHERE, is_offline=True)
    assert pgra.Index.load("me/index", device="cpu").search(TEXT, k=5) == hits


@pytest.mark.slow
def test_a_pushed_classifier_comes_back_by_its_id(client, lm_dirs, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub, lm = LoopbackHub(), str(lm_dirs["opt"])
    rows = [(text, "ab"[number % 2]) for number, text in enumerate(SENTENCES)]
    ours = pgra.Classifier(lm, rows, device="cpu")
    with hub.serve() as endpoint:
        client(endpoint)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        assert "me/head" in ours.push_to_hub("me/head")
        found = pgra.Classifier.load("me/head", lm=lm, device="cpu")
    assert found.predict(TEXT) == ours.predict(TEXT)
    assert not any(lm.encode() in data for data in hub.files("me/head").values())
