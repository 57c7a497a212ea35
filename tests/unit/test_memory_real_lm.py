"""The real small LM understands more with a memory, and can be taught what clarifications mean."""

import json

import pytest

from pgra.cli import main
from pgra.memory.families import load_family
from pgra.memory.lessons import read_seen

WORDS = ["river", "bright", "stone", "gather", "fleece", "narrow", "thunder", "borrow", "cellar"]
LESSON_WORDS = ["window", "gentle", "ladder", "repair"]


def write_words(path, words):
    kinds = load_family("lexical").answers
    lines = [{"type": kind, "word": w, "answer": f"{w}s"} for kind in kinds for w in words]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def memory(tmp_path, monkeypatch, capsys, two_threads):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(["memory", *map(str, words)])
        return code, capsys.readouterr().err

    return call


@pytest.mark.slow
def test_a_memory_makes_the_real_lm_understand_more(memory, tmp_path):
    flags = ["--words", write_words(tmp_path / "words.jsonl", WORDS), "--num_steps", 30]
    flags += ["--lm", "bundled:smollm2-135m", "--systems", "no-mem", "mem"]
    flags += ["--clarification_probabilities", 1, "--max_new_tokens", 8, "--output_dir", "run"]
    code, err = memory("stream", *flags)
    assert code == 0, err
    read = [tmp_path / "run" / name / "metrics.json" for name in ("no-mem-seed0", "mem-p1-seed0")]
    without, told = (json.loads(path.read_text()) for path in read)
    assert told["understood"] > without["understood"] + 0.15
    assert told["understood_area"] > without["understood_area"]


@pytest.mark.slow
def test_the_real_lm_is_taught_and_says_with_what(memory, tmp_path):
    flags = ["--words", write_words(tmp_path / "words.jsonl", LESSON_WORDS), "--max_steps", 2]
    flags += ["--packs_per_step", 1, "--frozen_layers", 28, "--output_dir", "tuned"]
    code, err = memory("finetune", *flags)
    assert code == 0, err
    assert {*LESSON_WORDS} <= {*read_seen(str(tmp_path / "tuned" / "lm")).words}
    asked = ["--words", write_words(tmp_path / "asked.jsonl", LESSON_WORDS[:1]), "--num_steps", 2]
    code, err = memory("stream", *asked, "--lm", "tuned/lm")
    assert code == 2
    assert f"was fine-tuned with the word '{LESSON_WORDS[0]}'" in err
