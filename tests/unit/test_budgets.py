"""Budgets outlive a process, belong to one device, LM and way, and never break a run."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from pgra.lm.causal_lm import FILE, CausalLM, recall_budget, remember_budget


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def lms(lm_dirs):
    def lm(kind, **how):
        return CausalLM.from_name(str(lm_dirs[kind]), device="cpu", **how)

    half, spread = lm("opt", dtype="bfloat16"), lm("opt", device_map="auto")
    return {"opt": lm("opt"), "llama": lm("llama"), "half": half, "spread": spread}


def test_a_budget_belongs_to_its_lm_way_dtype_and_spread(home, lms, lm_dirs):
    assert recall_budget(lms["opt"], "packed") is None
    assert not home.exists()  # looking leaves nothing behind
    for name, lm in lms.items():
        assert recall_budget(lm, "packed") is None
        remember_budget(lm, "packed", 100 + len(name))
    remember_budget(lms["opt"], "packed", 300)  # the last word stands, and others stay
    assert recall_budget(CausalLM.from_name(str(lm_dirs["opt"]), device="cpu"), "packed") == 300
    assert [recall_budget(lm, "packed") for lm in lms.values()] == [300, 105, 104, 106]
    assert recall_budget(lms["opt"], "none") is None


def test_a_budget_belongs_to_its_device(home, lms, monkeypatch):
    remember_budget(lms["opt"], "packed", 300)
    monkeypatch.setattr("pgra.lm.causal_lm.machine_memory", lambda: 1 << 30)
    assert recall_budget(lms["opt"], "packed") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b'"text"'])
def test_a_damaged_file_is_passed_over_with_a_warning_and_rewritten(home, lms, content, caplog):
    home.mkdir()
    (home / FILE).write_bytes(content)
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
