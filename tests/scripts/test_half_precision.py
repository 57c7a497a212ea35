"""What float16 does not hold: each command says so in one line, and --lm_dtype bfloat16 does."""

import shutil

import pytest
from conftest import SENTENCES, review_rows, write_jsonl
from scripted import Bench, call
from tiny_models import build_half_lm, build_lm
from transformers import AutoTokenizer

from pgra.cli import dispatch

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

RARE = "中"  # its tokens are in no other text
WAY_OUT = "use --lm_dtype bfloat16"


@pytest.fixture(scope="module")
def half_lm(tmp_path_factory):
    """An OPT of float16 weights, whose states pass float16's range behind a rare sign alone."""
    folder = tmp_path_factory.mktemp("half") / "lm"
    rare = AutoTokenizer.from_pretrained(build_lm(folder, "opt"))(RARE)["input_ids"]
    return build_half_lm(folder, too_large=rare[-1:])


@pytest.fixture
def there(half_lm, encoder_dir, t5_dir, tmp_path):
    """Files and models; one passage has the sign."""
    there = Bench(tmp_path, half_lm, encoder_dir, t5_dir)
    there.flags["num_candidates"] = len(SENTENCES)
    spoil(there)
    return there


def spoil(bench, *, is_whole=False):
    """Write the sign into a passage and a test query, or take it out."""
    sign = "" if is_whole else RARE
    bench.corpus.write_text("\n".join([*SENTENCES[1:], f"The {sign} is here."]) + "\n")
    rows = [{**row, "text": f"{row['text']} {sign}"} for row in review_rows(12, start=20)]
    write_jsonl(bench.test_file, rows)


FIND = ("task", "train_file", "test_file", "corpus", "encoder", "lm", "device", "num_candidates")
FIND = (*FIND, "num_evidence", "num_exemplars")


def words_of(there, *names, **more):
    flags = {**{name: there.flags[name] for name in names}, **more}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


ICL = ("task", "train_file", "test_file", "encoder", "lm", "device", "num_exemplars")


COMMANDS = {
    "rerank": lambda b: ["rerank", *words_of(b, *FIND)],
    "rerank TEXT": lambda b: ["rerank", "A warm film.", *words_of(b, *FIND)],
    "icl": lambda b: ["icl", *words_of(b, *ICL, "artifacts_dir", output_dir=b.run("icl"))],
    "train": lambda b: ["train", *b.argv("run")],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_number_that_float16_does_not_hold_is_one_error_and_bfloat16_holds_it(
    there, name, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[name](there)

    def ask(*more):
        return call(dispatch, [*words, *more])

    error = ask().error
    assert "no finite" in error
    assert "torch.float16" in error
    assert error.endswith(WAY_OUT)
    held = ask("--lm_dtype", "bfloat16")
    assert held.code == 0, held.err
    spoil(there, is_whole=True)  # the control: float16 holds the rest
    for folder in ("artifacts", "runs"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    held = ask()
    assert held.code == 0, held.err
