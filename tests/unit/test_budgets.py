"""Budgets outlive a process, belong to one device, LM and way, and never break a run."""

import json

import pytest

from pgra.lm.causal_lm import CausalLM, recall_budget, remember_budget


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_budget_belongs_to_its_lm_way_dtype_spread_and_device(home, lm_dirs, monkeypatch):
    def open_lm(kind, **how):
        return CausalLM.from_name(str(lm_dirs[kind]), device="cpu", **how)

    ways = {"dtype": "bfloat16"}, {"device_map": "auto"}
    lms = [open_lm("opt"), open_lm("llama"), *(open_lm("opt", **way) for way in ways)]
    for number, lm in enumerate(lms):
        assert recall_budget(lm, "packed") is None
        assert home.exists() == bool(number)  # looking leaves nothing behind
        remember_budget(lm, "packed", 100 + number)
    remember_budget(lms[0], "packed", 300)  # the last word stands, and others stay
    assert recall_budget(open_lm("opt"), "packed") == 300
    assert [recall_budget(lm, "packed") for lm in lms] == [300, 101, 102, 103]
    assert recall_budget(lms[0], "none") is None
    monkeypatch.setattr("pgra.lm.causal_lm.machine_memory", lambda: 1 << 30)
    assert recall_budget(lms[0], "packed") is None


VALUES = (0, -1, True, 2.5, "300", None)
DAMAGED = [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"{}"]


def test_a_damaged_file_is_passed_over_with_a_warning_and_rewritten(home, lm_dirs, caplog):
    lm = CausalLM.from_name(str(lm_dirs["opt"]), device="cpu")
    for content in [*DAMAGED, *(json.dumps({"tokens": value}).encode() for value in VALUES)]:
        remember_budget(lm, "packed", 40)
        caplog.clear()
        assert recall_budget(lm, "packed") == 40
        assert caplog.text == ""
        (path,) = home.rglob("*.json")
        path.write_bytes(content)
        assert recall_budget(lm, "packed") is None
        assert "is not used" in caplog.text
    home.rename(home.with_name("other"))
    home.write_text("")
    remember_budget(lm, "packed", 40)
    assert "the token budget is not remembered" in caplog.text
    assert recall_budget(lm, "packed") is None
