"""A finished reader with its model card on a hub: the real client, and a hub on loopback."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from loopback import TOKEN, LoopbackHub, point_client
from scripted import call, contents

from pgra.commands.push import main as push_main
from pgra.reader.record import read_record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(bench):
    bench.make("first", max_steps=1)
    return bench.run("first")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve a hub to this process's client, which reads the environment when it is imported."""
    hub = LoopbackHub()
    with hub.serve() as endpoint:
        point_client(monkeypatch, endpoint, tmp_path)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def push(run, *words):
    return call(push_main, ["--run", str(run), *words])


def test_every_run_has_a_card_that_tells_what_it_is(bench, run):
    text, metrics = (run / "reader" / "README.md").read_text(), bench.metrics("first")
    card = ModelCard(text).data
    result = card.eval_results[0]
    assert (result.metric_type, result.metric_value) == ("accuracy", round(metrics["value"], 6))
    assert card.base_model is None  # a folder of this machine is no hub id
    assert "license" not in card.to_dict()
    low, high = metrics["interval_95"]
    for told in (
        f"test accuracy: {metrics['value']:.4f} (95 % interval {low:.4f} to {high:.4f}, n = 12)",
        "negative = `terrible`, positive = `great`",
        "corpus: `corpus.txt`",
        "max_steps: 1",
        "pgra.Reader.from_pretrained",
    ):
        assert told in text, told
    assert str(bench.root) not in text


def test_a_pushed_reader_is_the_readers_folder_without_its_paths(run, hub, monkeypatch, tmp_path):
    before = contents(run)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    called = push(run, "--hub_model_id", "me/first", "--hub_private_repo")
    assert called.code == 0, called.err
    assert "pushed: http://127.0.0.1:" in called.out
    files = hub.files("me/first")
    assert set(files) - {".gitattributes"} == set(contents(run / "reader"))
    assert files["model.safetensors"] == before["reader/model.safetensors"]
    assert hub.made[0]["visibility"] == "private"
    assert hub.messages[0].startswith("sst2: test accuracy ")
    assert contents(run) == before
    copy = tmp_path / "fetched"
    copy.mkdir()
    for name, data in files.items():
        (copy / name).write_bytes(data)
    pushed, own = (read_record(folder).arguments["retriever"] for folder in (copy, run))
    assert pushed["encoder"] == Path(own["encoder"]).name
    for folder in (run.parents[1], Path(own["encoder"]).parent):
        assert str(folder).encode() in before["reader/pgra.json"]  # the control
        assert str(folder).encode() not in files["pgra.json"]


def test_a_push_that_fails_says_why_and_leaves_the_run(run, hub):
    before = contents(run)
    hub.is_broken = True
    called = push(run, "--hub_model_id", "me/late", "--hub_token", TOKEN)
    assert f"cannot push {run} to 'me/late': the hub says: " in called.error
    assert contents(run) == before
    assert TOKEN not in called.out + called.err
