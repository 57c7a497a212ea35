"""Budgets outlive a process, belong to one device, LM and way, and never break a run."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pgra.lm import causal_lm as budgets
from pgra.lm.causal_lm import FILE, CausalLM, describe_device, recall_budget, remember_budget


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def lms(lm_dirs):
    return {kind: CausalLM.from_name(str(lm_dirs[kind]), device="cpu") for kind in ("opt", "llama")}


def test_nothing_is_recalled_before_anything_was_remembered(home, lms):
    assert recall_budget(lms["opt"], "packed") is None
    assert not home.exists()  # looking leaves nothing behind


def test_a_budget_belongs_to_its_lm_way_and_dtype(home, lms, lm_dirs):
    remember_budget(lms["opt"], "packed", 300)
    assert recall_budget(lms["opt"], "packed") == 300
    again = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    assert recall_budget(again, "packed") == 300
    half = CausalLM.from_name(str(lm_dirs["opt"]), dtype="bfloat16", device="cpu")
    for lm, kind in ((lms["llama"], "packed"), (lms["opt"], "none"), (half, "packed")):
        assert recall_budget(lm, kind) is None


def test_a_budget_belongs_to_how_the_lm_is_spread(home, lms, lm_dirs):
    spread = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu", device_map="auto")
    assert spread.fingerprint == lms["opt"].fingerprint
    remember_budget(lms["opt"], "packed", 300)
    assert recall_budget(spread, "packed") is None
    remember_budget(spread, "packed", 900)
    assert (recall_budget(spread, "packed"), recall_budget(lms["opt"], "packed")) == (900, 300)


def test_the_last_word_stands_and_others_stay(home, lms):
    remember_budget(lms["opt"], "packed", 300)
    remember_budget(lms["llama"], "packed", 70)
    remember_budget(lms["opt"], "packed", 150)
    assert recall_budget(lms["opt"], "packed") == 150
    assert recall_budget(lms["llama"], "packed") == 70
    assert len(json.loads((home / FILE).read_text())) == 2


def test_a_budget_belongs_to_its_device(home, lms, monkeypatch):
    remember_budget(lms["opt"], "packed", 300)
    monkeypatch.setattr(budgets, "describe_device", lambda _: "another machine, 1 GiB")
    assert recall_budget(lms["opt"], "packed") is None


def test_a_device_is_named_with_its_memory():
    assert describe_device(torch.device("cpu")).startswith("cpu, ")
    assert describe_device(torch.device("cpu")).endswith(" GiB")


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_are_no_budget(home, lms, tokens):
    with pytest.raises(ValueError, match=f"tokens is {tokens}: it must be at least 1"):
        remember_budget(lms["opt"], "packed", tokens)
    assert not home.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_damaged_file_is_passed_over_with_a_warning_and_rewritten(home, lms, content, caplog):
    home.mkdir()
    (home / FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING, "pgra"):
        assert recall_budget(lms["opt"], "packed") is None
    assert "is not used" in caplog.text
    remember_budget(lms["opt"], "packed", 40)
    caplog.clear()
    assert recall_budget(lms["opt"], "packed") == 40
    assert caplog.text == ""


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "300", None])
def test_a_value_that_is_no_budget_is_passed_over_and_the_others_stay(home, lms, value, caplog):
    remember_budget(lms["opt"], "packed", 40)
    remember_budget(lms["llama"], "packed", 70)
    found = json.loads((home / FILE).read_text())
    first = next(key for key in found if found[key] == 40)
    (home / FILE).write_text(json.dumps({**found, first: value}))
    assert recall_budget(lms["opt"], "packed") is None
    assert f"{value!r} is not used" in caplog.text
    assert recall_budget(lms["llama"], "packed") == 70


def test_a_home_that_cannot_be_written_costs_a_warning(tmp_path, lms, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "file" / "home"))
    remember_budget(lms["opt"], "packed", 40)
    assert "the token budget is not remembered" in caplog.text
    assert recall_budget(lms["opt"], "packed") is None


def test_jobs_that_write_at_once_lose_nothing_of_each_other(home, lms):
    names = [f"{name}-{number}" for number in range(10) for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:  # each call opens the lock anew, as another process would
        list(pool.map(lambda name: remember_budget(lms["opt"], name, len(name)), names))
    assert [recall_budget(lms["opt"], name) for name in names] == [3] * 40
