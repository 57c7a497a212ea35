"""What float16 does not hold: each command goes on in bfloat16 by itself, and says so once."""

import io
import json
import re
import shutil

import pytest
import yaml
from conftest import SENTENCES, review_rows, write_jsonl
from scripted import Bench, call, run_apart
from tiny_models import build_half_lm, build_lm
from transformers import AutoTokenizer

import pgra
from pgra.cli import dispatch
from pgra.lm import load
from pgra.memory.families import load_family
from pgra.report.results import read_lines

WITHOUT_GPU = load.choose_dtype
pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

RARE = "中"  # its tokens are in no other text
SAID = "it is loaded anew in bfloat16, which is coarser"
ANEW = "was made in float16: it is made anew"
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
    """Write the sign into a passage, a test query and what a memory is asked, or take it out."""
    sign = "" if is_whole else RARE
    words = [
        {"type": kind, "word": f"{sign}sea", "answer": "water"}
        for kind in load_family("lexical").answers
    ]
    write_jsonl(bench.root / "words.jsonl", words)
    (bench.root / "typed.txt").write_text(f"what is akin to < sea > ?\nwhat is {sign} akin to ?\n")
    bench.corpus.write_text("\n".join([*SENTENCES[1:], f"The {sign} is here."]) + "\n")
    rows = [{**row, "text": f"{row['text']} {sign}"} for row in review_rows(12, start=20)]
    write_jsonl(bench.test_file, rows)


FIND = ("task", "train_file", "test_file", "corpus", "encoder", "lm", "device", "num_candidates")
FIND = (*FIND, "num_evidence", "num_exemplars")


def words_of(there, *names, **more):
    flags = {**{name: there.flags[name] for name in names}, **more}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


ICL = ("task", "train_file", "test_file", "encoder", "lm", "device", "num_exemplars")


def memory_words(bench, *words):
    """Give flags under which an LM of a short window answers questions to a memory."""
    example = {"question": "what is akin to < pretty > ?", "answer": "the synonym is nice"}
    prompt = {"separator": "\n#\n", "end": "END", "clarified": "{question} | {feedback}"}
    path = bench.root / "prompt.yaml"
    path.write_text(yaml.safe_dump({**prompt, "examples": [example]}))
    flags = words_of(bench, "lm", "device", "artifacts_dir", prompt=path, max_new_tokens=4)
    return ["memory", *words, *flags]


def grid_words(bench, points=None):
    named = {name: bench.flags[name] for name in ICL if name != "device"}
    named = {name: v if isinstance(v, int) else str(v) for name, v in named.items()}
    base = {"method": "kate", **named}
    points = points or [{"name": name, "exemplars": name} for name in ("random", "knn")]
    grid = bench.root / "grid.yaml"
    grid.write_text(yaml.safe_dump({"seeds": [0], "base": base, "points": points}))
    flags = words_of(bench, "device", "artifacts_dir", output_dir=bench.run("grid"))
    return ["ablate", str(grid), *flags]


COMMANDS = {
    "ablate": grid_words,
    "memory chat": lambda b: memory_words(b, "chat", "--memory", str(b.root / "memory.sqlite")),
    "memory stream": lambda b: [
        *memory_words(b, "stream", "--words", str(b.root / "words.jsonl"), "--num_steps", "6"),
        *("--systems", "no-mem", "mem", "--output_dir", str(b.run("stream"))),
    ],
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

    def ask(*more):
        typed = io.BytesIO((there.root / "typed.txt").read_bytes())
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed))
        return call(dispatch, [*words, *more])

    called = ask()
    assert called.code == 0, called.err
    assert called.err.count(SAID) == 1
    assert "Traceback" not in called.err
    plain = ask()  # the same command again begins in bfloat16
    assert (plain.code, plain.err.count(SAID)) == (0, 0)
    assert called.out.splitlines()[-3:] == plain.out.replace(" (reused)", "").splitlines()[-3:]
    # The controls: it is not done where the dtype was asked for, and not where float16 holds all.
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    refused = ask("--lm_dtype", "float16")
    assert WAY_OUT in (refused.out if name == "ablate" else refused.error)
    spoil(there, is_whole=True)
    shutil.rmtree(tmp_path / "artifacts")
    held = ask()
    assert (held.code, held.err.count(SAID)) == (0, 0), held.err


JOB = """
import json, sys, torch
from pgra.cli import dispatch, run
from pgra.lm import load

choose = load.choose_dtype
load.choose_dtype = lambda name, device, config=None: choose(name, torch.device("cuda"), config)
sys.exit(max(run(dispatch, words) for words in json.loads(sys.argv[1])))
"""
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.slow
def test_two_processes_go_on_together_whichever_finds_out(there):
    """The bank's states and the answers, which are shared; a layer, which one process chooses."""
    spoil_training(there)
    held = write_jsonl(there.root / "held.jsonl", review_rows(40))

    def rerank(name, **more):
        return ["rerank", *words_of(there, *FIND, **more, artifacts_dir=there.root / name)]

    def elsewhere(words, name):
        return [*words, "--artifacts_dir", str(there.root / name)]

    needy = [
        rerank("bank"),
        rerank("layer", lm_layer="auto"),
        elsewhere(COMMANDS["icl"](there), "answers"),
        elsewhere(grid_words(there, [{"name": "none", "num_exemplars": 0}, {"name": "some"}]), "g"),
    ]
    job = there.root / "job.py"
    job.write_text(JOB)
    for asked, least, most in ((needy, 4, 8), ([rerank("held", train_file=held)], 0, 0)):
        done = run_apart([*LAUNCH, str(job), json.dumps(asked)], timeout=500)
        assert done.returncode == 0, done.stdout
        assert least <= done.stdout.count(SAID) <= most, done.stdout  # by one process or by both
        assert "Traceback" not in done.stdout


def spoil_training(bench, *, which=range(40)):
    """Write the sign into training texts, and into no others."""
    spoil(bench, is_whole=True)
    rows = review_rows(40)
    for place in which:
        rows[place]["text"] += f" {RARE}"
    write_jsonl(bench.train_file, rows)


def told_of(folder):
    """Give the dtypes and the scores of the runs in a folder, by name."""
    return {
        path.parent.name: (
            re.findall(r'"dtype":\s*"(\w*float16)"', path.read_text())[:1],
            [line["scores"] for line in read_lines(path.parent / "predictions.jsonl")],
        )
        for path in sorted(folder.glob("**/run.json"))
    }


def seeds_words(bench, name, **more):
    own = {"output_dir": bench.run(name), "exemplars": "random", "artifacts_dir": bench.root / name}
    return ["icl", *words_of(bench, *ICL, **own, **more), "--seeds", "0", "1"]


def test_a_series_is_of_one_dtype_whichever_seed_needs_it(there):
    spoil(there, is_whole=True)
    assert call(dispatch, seeds_words(there, "first")).code == 0
    drawn = [
        {e["id"] for e in next(iter(read_lines(p / "predictions.jsonl")))["exemplars"]}
        for p in (there.run("first") / f"seed-{seed}" for seed in (0, 1))
    ]
    late = min(drawn[1] - drawn[0])
    spoil_training(there, which=[int(late.rpartition("-")[2])])
    called = call(dispatch, seeds_words(there, "series"))
    assert (called.code, called.err.count(SAID), called.err.count(ANEW)) == (0, 1, 1), called.err
    plain = call(dispatch, seeds_words(there, "plain", lm_dtype="bfloat16"))
    assert (plain.code, plain.err.count(ANEW)) == (0, 0), plain.err
    assert told_of(there.run("series")) == told_of(there.run("plain"))
    # One that another command had finished stays, and the way out is said.
    one = seeds_words(there, "later")[:-1]
    assert call(dispatch, one).code == 0
    assert [dtype for (dtype,), _ in told_of(there.run("later")).values()] == ["float16"]
    assert "delete it and give the same command again" in call(dispatch, [*one, "1"]).error


def test_a_grid_is_of_one_dtype_whichever_run_needs_it(there):
    spoil_training(there)
    words = grid_words(there, [{"name": "none", "num_exemplars": 0}, {"name": "some"}])
    called = call(dispatch, words)
    assert (called.code, called.err.count(SAID), called.err.count(ANEW)) == (0, 1, 1), called.err
    assert {dtype for (dtype,), _ in told_of(there.run("grid")).values()} == {"bfloat16"}
    again = call(dispatch, words)
    assert (again.code, again.err.count(ANEW)) == (0, 0), again.err


def test_streams_are_of_one_dtype_whichever_needs_it(there):
    def step(word, sign):
        told = {"feedback": f"a synonym {sign}", "expected_answer": "x", "type": "syn"}
        return {"word": word, "question": f"what is akin to < {word} > ?", **told}

    path = there.root / "stream.jsonl"
    words = memory_words(there, "stream", "--stream", str(path), "--systems", "no-mem", "mem")
    words += ["--output_dir", str(there.run("streams")), "--clarification_probabilities", "1"]
    for sign, said in ((RARE, 1), ("", 0)):  # in what a memory adds; the control
        shutil.rmtree(there.run("streams"), ignore_errors=True)
        shutil.rmtree(there.artifacts, ignore_errors=True)
        write_jsonl(path, [step(word, sign) for word in ("sea", "sky", "sea", "sky")])
        called = call(dispatch, words)
        assert (called.code, called.err.count(SAID)) == (0, said), called.err
        made = json.loads((there.run("streams") / "run.json").read_text())
        assert made["lm"]["dtype"] == ("bfloat16" if said else "float16")
        assert len(list(there.run("streams").glob("*/metrics.json"))) == 2


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


def test_a_trained_reader_decides_a_new_text_with_evidence_found_in_bfloat16(there, monkeypatch):
    spoil(there, is_whole=True)
    there.make("run")
    words = ["--run", str(there.run("run")), "--device", "cpu", "--json"]
    fell = "was made in float16, which does not hold all numbers of its LM"
    plain = call(dispatch, ["predict", "A warm film.", *words])
    assert (plain.code, plain.err.count(SAID), plain.err.count(fell)) == (0, 0, 0), plain.err
    with monkeypatch.context() as patch:  # on a machine without a GPU it stays what it was
        patch.setattr(load, "choose_dtype", WITHOUT_GPU)
        assert WAY_OUT in call(dispatch, ["predict", f"A {RARE} film.", *words]).error
    called = call(dispatch, ["predict", f"A {RARE} film.", *words])
    assert (called.code, called.err.count(SAID), called.err.count(fell)) == (0, 1, 1), called.err
    again = call(dispatch, ["predict", f"A {RARE} film.", *words])
    assert (again.code, again.err.count(SAID), again.err.count(fell)) == (0, 0, 1), again.err
    assert again.out == called.out


def test_a_similarity_that_was_fitted_in_float16_refuses_a_text_that_needs_more(there):
    spoil(there, is_whole=True)
    there.make("run", similarity="whitened_cosine")
    words = ["--run", str(there.run("run")), "--device", "cpu", "--json"]
    plain = call(dispatch, ["predict", "A warm film.", *words])
    assert (plain.code, plain.err.count(SAID)) == (0, 0), plain.err
    refused = call(dispatch, ["predict", f"A {RARE} film.", *words])
    assert (refused.code, refused.err.count(SAID)) == (2, 0), refused.err
    assert f"no finite state in torch.float16 for 1 of 1 texts, such as 'A {RARE} film." in (
        refused.error
    )
    assert WAY_OUT in refused.error
    assert "Traceback" not in refused.err
    again = call(dispatch, ["predict", "A warm film.", *words])  # the run is as good as before
    assert (again.code, again.out) == (0, plain.out)
    # The control: one that is not fitted goes on in bfloat16, beside it too.
    there.make("cosine", similarity="cosine")
    other = [*words[:1], str(there.run("cosine")), *words[2:]]
    fallen = call(dispatch, ["predict", f"A {RARE} film.", *other])
    assert (fallen.code, fallen.err.count(SAID)) == (0, 1), fallen.err
    last = call(dispatch, ["predict", "A warm film.", *words])
    assert (last.code, last.out) == (0, plain.out), last.err


@pytest.mark.parametrize("num_prefixes", [1, 2])
def test_a_run_elsewhere_has_its_dtype_under_several_prefixes_too(num_prefixes, there, monkeypatch):
    spoil(there, is_whole=True)
    there.make("run", num_prefixes=num_prefixes)
    words = ["predict", "A warm film.", "--run", str(there.run("run")), "--device", "cpu", "--json"]
    plain = call(dispatch, words)
    monkeypatch.setattr(load, "choose_dtype", WITHOUT_GPU)  # where "auto" is float32
    called = call(dispatch, words)
    assert (called.code, called.out) == (plain.code, plain.out) != (2, ""), called.err


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
