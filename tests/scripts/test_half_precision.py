"""What float16 does not hold: each command goes on in bfloat16 by itself, and says so once."""

import io
import json
import shutil

import pytest
from conftest import SENTENCES, review_rows, write_jsonl
from scripted import Bench, call
from tiny_models import build_half_lm, build_lm
from transformers import AutoTokenizer

import pgra
from pgra.cli import dispatch

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

RARE = "中"  # its tokens are in no other text
SAID = "it is loaded anew in bfloat16, which is coarser"
WAY_OUT = "use --lm_dtype bfloat16 or float32"


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
    "worth": lambda b: ["worth", *words_of(b, *FIND, "model_name_or_path", "artifacts_dir")],
    "icl": lambda b: ["icl", *words_of(b, *ICL, "artifacts_dir", output_dir=b.run("icl"))],
    "train": lambda b: ["train", *b.argv("run")],
    "ralm": lambda b: [
        *("train", "--method", "ralm", "--output_dir", str(b.run("ralm")), "--reader_lm"),
        *(str(b.lm), *words_of(b, *FIND, "artifacts_dir")),
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_on_in_bfloat16_and_says_so_once(there, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[name](there)
    called = call(dispatch, words)
    assert called.code == 0, called.err
    assert called.err.count(SAID) == 1
    assert "Traceback" not in called.err
    plain = call(dispatch, words)  # the same command again begins in bfloat16
    assert (plain.code, plain.err.count(SAID)) == (0, 0)
    assert called.out.splitlines()[-3:] == plain.out.replace(" (reused)", "").splitlines()[-3:]
    # The controls: it is not done where the dtype was asked for, and not where float16 holds all.
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    assert WAY_OUT in call(dispatch, [*words, "--lm_dtype", "float16"]).error
    spoil(there, is_whole=True)
    shutil.rmtree(tmp_path / "artifacts")
    held = call(dispatch, words)
    assert (held.code, held.err.count(SAID)) == (0, 0), held.err


def test_a_run_made_in_float16_is_evaluated_in_bfloat16_where_that_does_not_hold(there):
    spoil(there, is_whole=True)
    there.make("run")
    rows = [{"text": f"A {RARE} film.", "label": "positive"}]
    other = write_jsonl(there.root / "other.jsonl", rows)
    words = ["evaluate", "--run", str(there.run("run")), "--device", "cpu"]
    assert "made in float16" not in call(dispatch, words).err  # the control
    elsewhere = ["--test_file", str(other), "--output_dir", str(there.run("other"))]
    called = call(dispatch, [*words, *elsewhere])
    assert (called.code, called.err.count(SAID)) == (0, 1), called.err
    assert "was made in float16, which does not hold all numbers of its LM" in called.err
    bfloat16 = there.make("plain", lm_dtype="bfloat16", test_file=other)
    evidence = [
        json.loads((there.run(name) / "predictions.jsonl").read_text())["evidence"]
        for name in ("other", "plain")
    ]
    assert evidence[0] == evidence[1], bfloat16.err
    # What the run's own reader is asked stays in the run's dtype: one text of several is refused.
    predict = ["predict", f"A {RARE} film.", *words[1:]]
    assert WAY_OUT in call(dispatch, predict).error


def test_lines_that_are_typed_are_answered_in_bfloat16_from_the_first_that_needs_it(
    there, monkeypatch
):
    spoil(there, is_whole=True)
    made = call(dispatch, COMMANDS["icl"](there))
    assert (made.code, made.err.count(SAID)) == (0, 0)
    words = ["predict", "--run", str(there.run("icl")), "--device", "cpu", "--json"]
    text = f"A warm {RARE} film."
    typed = io.TextIOWrapper(io.BytesIO(f"A warm film.\n{text}\nA dull film.\n".encode()))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", typed)
        called = call(dispatch, [*words, "--interactive"])
    assert (called.code, called.err.count(SAID)) == (0, 1), called.err
    told = [json.loads(line) for line in called.out.splitlines()]
    assert ["error" in line for line in told] == [False] * 3, told
    again = call(dispatch, ["predict", text, *words[1:]])
    assert (again.code, again.err.count(SAID)) == (0, 0), again.err
    (answer,) = map(json.loads, again.out.splitlines())
    found = pgra.Run.open(there.run("icl")).predict(text)
    assert answer["scores"] == told[1]["scores"] == found.scores
