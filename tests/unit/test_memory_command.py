"""`pgra memory`, as a user calls it."""

import json
from dataclasses import replace

import pytest
from tiny_models import build_lm

from pgra.cli import main
from pgra.memory.families import load_family
from pgra.memory.stream import make_stream


@pytest.fixture
def memory(tmp_path, monkeypatch, capsys):
    """Call the command in an empty folder; give its code, and what it said on both streams."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(["memory", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def error(called):
    code, out, err = called
    assert (code, out) == (2, "")
    assert err.count("\n") == 2
    return err.strip().removeprefix("pgra: error: ")


def test_a_correction_is_noted_found_changed_and_forgotten(memory):
    assert memory("add", "what is like < a >", "I mean a synonym")[1] == (
        "memory.sqlite: noted, as entry 1 of 1\n"
    )
    lexical = ("--family", "lexical")
    _, out, _ = memory("add", "what is unlike < b >", "an\nantonym", *lexical)
    assert "note: entry 1 has a key at edit distance 2 and another feedback" in out
    _, out, _ = memory("lookup", "what is like < c >", "--num_matches", 9, *lexical)
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines] == [["0.0000", "used"], ["-2.0000", "passes"]]
    assert '"what is unlike < b >" -> "an\\nantonym"' in lines[1]  # in full, in quotes
    _, out, _ = memory("lookup", "quite another < c >", *lexical)
    assert all("too far" in line for line in out.splitlines())
    assert "is now entry 3" in memory("correct", 1, "a synonym")[1]
    assert "1 pairs of near keys" in memory("list", "--collisions", *lexical)[1]
    assert memory("forget", 2)[1] == "memory.sqlite: 1 forgotten, 1 entries left\n"
    _, out, _ = memory("list", "--verify")
    assert out.splitlines()[0] == "memory.sqlite: whole: 4 events, 1 entries"
    assert out.count("->") == 1
    assert memory("list", "--log")[1].count("->") == 4


def test_a_question_of_any_kind_gets_feedback_of_its_like_and_no_other(memory):
    memory("add", "why?", "I want the reason for the last answer")
    memory("add", "<b>bold</b>", "explain the tag")
    memory("add", "How do I reset my password", "of the router")

    def told(question, *flags):
        return memory("lookup", question, "--num_matches", 1, *flags)[1].split()[1]

    like = (
        "Why",
        "<b>bold</B>",
        "how do I  reset my pasword?",
        "Please, how do I reset my password?",
    )
    other = ("hello", "tea", "x < 3 and y > 2", "<p>a</p>", "<i>what is the capital of France</i>")
    assert [told(question) for question in like] == ["used"] * 4
    assert {told(question) for question in other} == {"too"}
    assert {told(question, "--family", "lexical") for question in other} == {
        "used"
    }  # the release's
    assert memory("list", "--collisions")[1] == "0 pairs of near keys with different feedback\n"
    _, out, _ = memory("add", "How do I reset my passwords?", "of the mail")
    assert "note: entry 3 has a key at edit distance 1" in out
    assert "note: entry" not in memory("add", "how?", "in steps")[1]


def test_label_feedback_shows_what_the_gate_lets_through(memory):
    for number in range(3):
        memory("add", f"who wrote volume {number} of it?", "Homer")
    memory("add", "where is the sea?", "here")
    asked = ("lookup", "who wrote volume 1 of it?", "--num_matches", 9, "--family", "webquestions")

    def told(*flags):
        return [line.split()[1] for line in memory(*asked, *flags)[1].splitlines()]

    assert told() == ["used"] * 4  # as the paper has it
    assert told("--threshold", -1) == ["used"] * 3 + ["too"]


def test_a_memory_is_exported_imported_damaged_and_salvaged(memory, tmp_path):
    memory("add", "a", "one", "--task", "t", "--source", "me")
    assert memory("export", "log.jsonl")[1] == "log.jsonl: 1 events\n"
    told = memory("import", "log.jsonl", "--memory", "other.sqlite")[1]
    assert told == "other.sqlite: 1 events added, 0 were there; 1 entries\n"
    assert "t  " in memory("list", "--memory", "other.sqlite")[1]
    path = tmp_path / "memory.sqlite"
    path.write_bytes(b"?" * 100 + path.read_bytes()[100:])
    told = error(memory("list"))
    assert "is damaged" in told
    assert "pgra memory salvage memory.sqlite --output NEW.sqlite" in told
    _, out, _ = memory("salvage", "memory.sqlite", "--output", "new.sqlite")
    assert "1 events of memory.sqlite were read whole" in out
    assert '"a" -> "one"' in memory("list", "--memory", "new.sqlite")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ad",), "unknown word after pgra memory 'ad'. Did you mean 'add'?"),
        (("add", "a", "b", "c"), "'c' is one text too many: put each in quotes"),
        (("list",), "there is no memory memory.sqlite: pgra memory add makes one"),
        (("forget", "1"), "there is no memory memory.sqlite"),
        (("forget", "x"), "invalid int value: 'x'"),
        (("lookup", "a", "--family", "lexcal"), "unknown family of questions 'lexcal'"),
        (
            ("gate", "--stream", "x", "--family", "webquestions"),
            "gate chooses a threshold by the types of questions, and those of 'webquestions'",
        ),
        (("import", "none.jsonl"), "none.jsonl does not exist"),
        (("stream",), "give the questions: --stream FILE.jsonl, or --words FILE"),
        (
            ("stream", "--stream", "x", "--dev_stream", "y", "--threshold", "-3"),
            "dev_stream chooses the threshold",
        ),
        *(  # what is needed is named with how the command is called
            ((word, *given), f"{missing} is missing: pgra memory {word} {usage}")
            for word, given, missing, usage in (
                ("add", ["a"], "feedback", '"QUESTION" "FEEDBACK"'),
                ("lookup", [" "], "question", '"QUESTION"'),
                ("correct", ["1"], "feedback", '"IDS" "FEEDBACK"'),
                ("forget", [], "ids", '"IDS"'),
                ("export", [], "file", '"FILE"'),
                ("salvage", ["x"], "output", '"FILE" --output OUTPUT'),
                ("gate", [], "stream", "--stream STREAM"),
                ("score", [], "outputs", '"OUTPUTS"'),
                ("train-similarity", ["x"], "output_dir", '"PAIRS" --output_dir OUTPUT_DIR'),
            )
        ),
    ],
)
def test_a_users_error_is_one_line_and_leaves_nothing(memory, tmp_path, words, message):
    told = error(memory(*words))
    assert message in told
    assert list(tmp_path.iterdir()) == []


def write_stream(path, steps):
    lines = [
        {
            "type": step.kind,
            "word": step.word,
            "question": step.question,
            "feedback": step.feedback,
            "expected_answer": step.expected[0],
        }
        for step in steps
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_gate_is_tried_on_the_half_that_it_was_not_chosen_on(memory, tmp_path):
    family = load_family("lexical")
    ways = {way.id: way for way in family.phrasings}
    family = replace(family, phrasings=[ways["syn0"], ways["ant0"]])
    words = {kind: {"a": ["b"], "c": ["d"]} for kind in family.answers}
    steps = make_stream(family, words, num_steps=12, seed=0)
    code, out, _ = memory("gate", "--stream", write_stream(tmp_path / "s.jsonl", [*steps, *steps]))
    default, chosen = out.splitlines()
    assert code == 0
    # Both types among 12 questions: the first of each finds nothing right, one finds the other's.
    assert default.startswith("threshold -5 (default): precision 0.909, recall 1.000, 11 of 12")
    assert chosen.startswith("threshold 0 (chosen on 12 others): precision 1.000, recall 1.000, 10")
    _, out, _ = memory("gate", "--stream", "s.jsonl", "--skip", 4)
    assert out.splitlines()[0] == default
    assert "(chosen on 8 others)" in out.splitlines()[1]
    called = memory("gate", "--stream", "s.jsonl", "--skip", 12)
    assert error(called).startswith("skip is 12, and the threshold is chosen on the first half")


@pytest.mark.slow
def test_a_stream_runs_whole_on_a_tiny_lm_and_is_not_asked_again(memory, tmp_path, encoder_dir):
    family = load_family("lexical")
    words = {kind: {"a": ["b"], "c": ["d"]} for kind in family.answers}
    steps = make_stream(family, words, num_steps=12, seed=0)
    lm = build_lm(tmp_path / "lm", "llama", window=4096)
    flags = ["--stream", write_stream(tmp_path / "s.jsonl", steps[:6]), "--lm", lm]
    flags += ["--dev_stream", write_stream(tmp_path / "dev.jsonl", steps), "--device", "cpu"]
    flags += ["--lookup", "encoder", "--encoder", encoder_dir, "--max_new_tokens", "3"]
    flags += ["--max_prompt_tokens", "4000", "--output_dir", "run"]
    code, out, _ = memory("stream", *flags)
    assert code == 0
    out = " ".join(out.split())
    for told in ("| NO-MEM |", "| GROW-PROMPT, p = 0.5 |", "| MEM-PROMPT, p = 0.5 |", "Gate: "):
        assert told in out
    assert " ".join((tmp_path / "run" / "report.md").read_text().split()) in out
    one = (tmp_path / "run" / "mem-p0.5-seed0" / "steps.jsonl").read_bytes()
    for path in (tmp_path / "run").rglob("metrics.json"):
        path.unlink()
    assert " ".join(memory("stream", *flags)[1].split()) == out  # played again, from kept answers
    assert (tmp_path / "run" / "mem-p0.5-seed0" / "steps.jsonl").read_bytes() == one
    told = error(memory("stream", *flags, "--max_new_tokens", "4"))
    assert "run was made with max_new_tokens 3, this run asks for 4" in told
