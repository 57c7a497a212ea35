"""What float16 does not hold: a command says so in one line, and --lm_dtype bfloat16 does."""

import pytest
from conftest import SENTENCES, review_rows, write_jsonl
from scripted import Bench, call
from tiny_models import build_half_lm, build_lm
from transformers import AutoTokenizer

from pgra.cli import dispatch

RARE = "中"  # its tokens are in no other text


@pytest.fixture(scope="module")
def half_lm(tmp_path_factory):
    """An OPT of float16 weights, whose states pass float16's range behind a rare sign alone."""
    folder = tmp_path_factory.mktemp("half") / "lm"
    rare = AutoTokenizer.from_pretrained(build_lm(folder, "opt"))(RARE)["input_ids"]
    return build_half_lm(folder, rare[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "icl"])
def test_a_number_that_float16_does_not_hold_is_one_error_and_bfloat16_holds_it(
    command, half_lm, encoder_dir, t5_dir, tmp_path
):
    bench = Bench(tmp_path, half_lm, encoder_dir, t5_dir)
    bench.corpus.write_text("\n".join([*SENTENCES[1:], f"The {RARE} is here."]) + "\n")
    rows = [{**row, "text": f"{row['text']} {RARE}"} for row in review_rows(12, start=20)]
    write_jsonl(bench.test_file, rows)
    bench.flags["num_candidates"] = len(SENTENCES)
    if command == "icl":
        names = ("task", "train_file", "test_file", "encoder", "lm", "device", "num_exemplars")
        bench.flags = {name: bench.flags[name] for name in (*names, "artifacts_dir")}
    words = [command, *bench.argv("run")]
    error = call(dispatch, [*words, "--lm_dtype", "float16"]).error
    assert "no finite" in error
    assert "torch.float16" in error
    assert error.endswith("use --lm_dtype bfloat16")
    held = call(dispatch, [*words, "--lm_dtype", "bfloat16"])
    assert held.code == 0, held.err
