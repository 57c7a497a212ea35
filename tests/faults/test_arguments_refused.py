"""Values that no argument can have are refused by one rule, with the argument's name."""

import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgra.cli import main
from pgra.config import Rule
from pgra.errors import ConfigError
from pgra.retrieval.faiss import empty_index

TRAIN = ["train", "--task", "sst2"]
INDEX = ["index", "--corpus", "c.txt"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*TRAIN, "--weight_decay", "nan"], "weight_decay is nan: it must be a finite number"),
        ([*TRAIN, "--max_grad_norm", "inf"], "max_grad_norm is inf: it must be a finite number"),
        (["memory", "lookup", "x", "--threshold", "nan"], "threshold is nan: it must be a finite"),
        ([*TRAIN, "--output_dir", ""], "output_dir is empty: give a path"),
        ([*INDEX, "--artifacts_dir", ""], "artifacts_dir is empty: give a path"),
        ([*INDEX, "--artifacts_dir", os.fsdecode(b"caf\xe9")], "b'caf\\xe9', which is not UTF-8"),
        (["memory", "forget", "9" * 24, "--memory", "m.sqlite"], "ids is 99999999"),
        (["memory", "forget", "9" * 5000, "--memory", "m.sqlite"], "it must be a whole number"),
        ([*TRAIN, "--max_steps", "abc"], "max_steps is 'abc': it must be a whole number"),
        ([*TRAIN, "--max_grad_norm", "abc"], "max_grad_norm is 'abc': it must be a number"),
        ([*TRAIN, "--bf16", "maybe"], "bf16 is 'maybe': it must be true or false"),
        (["search", "x", "--corpus"], "--corpus is empty: give its value"),
        (["ablate", "k", "--dry-run", "--axis", "learning_rate=.nan"], "must be a finite number"),
        (["models", "x"], "unknown argument 'x'"),
    ],
)
def test_one_line_names_the_argument_and_its_value(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("pgra: error: ")
    assert told in last
    assert "argument --" not in last  # argparse's own wording


@given(st.floats() | st.integers() | st.text())
def test_a_rule_takes_what_is_finite_fits_64_bits_and_is_utf8(value):
    try:
        Rule().check("value", value)
    except ConfigError:
        if isinstance(value, float):
            assert not math.isfinite(value)
        elif isinstance(value, int):
            assert abs(value) >= 1 << 63
        else:
            assert any("\ud800" <= letter <= "\udfff" for letter in value)
    else:
        assert not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("factory", ["IVF0,Flat", "HNSW0", "HNSW1", "IVF4_HNSW1,Flat", "PQ2x0"])
def test_factories_that_end_the_process_are_refused(factory):
    with pytest.raises(ConfigError, match="is too small a number"):
        empty_index(factory, 16, 300)
    made = empty_index(factory.replace("1", "2").replace("0", "2"), 16, 300)  # the control
    assert made.d == 16
