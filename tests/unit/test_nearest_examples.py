"""MemPrompt's prefix by KATE: each question's nearest examples, never the question itself."""

from dataclasses import replace

import pytest
from conftest import write_jsonl
from following_lm import FollowingLM, write_stream

from pgra.cli import main
from pgra.core import Context, Example
from pgra.errors import ConfigError, DataError
from pgra.memory.families import load_family
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import EditLookup
from pgra.memory.nearest_examples import choose_examples, read_pool, without_slots
from pgra.memory.prompts import FewShot, PromptExample
from pgra.memory.stream import GrowPrompt, MemPrompt, NoMemory, PromptedLM, Step

POOL = [
    PromptExample("what is akin to < red > ?", "the synonym for red is scarlet"),
    PromptExample("what is the reverse of < up > ?", "the antonym for up is down"),
    PromptExample(
        "say more about < owl > ?", "the definition of owl is a bird", "I want a definition"
    ),
    PromptExample("what sounds like < sea > ?", "the homonym for sea is see"),
]
PLAIN = FewShot("mine", "\n#\n", "END", "{question} | {feedback}", tuple(POOL[:2]))
ASKED = [
    "what is the reverse of < hot > ?",
    "say more about < oak > ?",
    "what is akin to < red > ?",
]


def chosen(tmp_path, *, count=2, form="slotless", pool=POOL, asked=ASKED):
    context = Context(device="cpu", artifacts=tmp_path)
    how = {"encoder": "bm25", "key_form": form, "context": context}
    return choose_examples(PLAIN, pool, asked, count=count, **how)


def step(question):
    return Step("0", "ant", question, "I want an antonym", expected=("the antonym for w is v",))


def test_each_question_has_its_nearest_first(tmp_path):
    prompt = chosen(tmp_path)
    assert prompt.examples_of(ASKED[0]) == (POOL[1], POOL[0])
    assert prompt.examples_of(ASKED[1]) == (POOL[2], POOL[0])
    assert prompt.write(ASKED[1]).startswith("say more about < owl > ? | I want a definition\n#\n")
    # Another question has the prompt's own ones, as all have without KATE.
    assert prompt.write("else") == PLAIN.write("else")
    assert PLAIN.write(ASKED[1]).startswith("what is akin to < red > ?\n#\n")


def test_one_question_with_two_answers_is_two_examples(tmp_path):
    pool = [*POOL, PromptExample(POOL[2].question, "say more about means the definition"), POOL[0]]
    shown = chosen(tmp_path, pool=pool, count=2).examples_of(ASKED[1])
    assert shown == (pool[2], pool[len(POOL)])
    with pytest.raises(ConfigError, match=f"there are {len(POOL) + 1} different examples"):
        chosen(tmp_path, pool=pool, count=len(POOL) + 2)


def test_a_question_is_never_shown_itself(tmp_path):
    prompt = chosen(tmp_path, count=3)
    shown = [one.question for one in prompt.examples_of(ASKED[2])]
    assert len(shown) == 3
    assert POOL[0].question not in shown
    assert POOL[0].question in [one.question for one in prompt.examples_of(ASKED[0])]


def test_the_word_asked_about_does_not_count_unless_asked_for(tmp_path):
    pool = [*POOL, PromptExample("tell me now please < ash > ?", "a")]
    asked = ["tell < sea > ?"]  # "sea" stands in the shorter example
    first = [
        chosen(tmp_path / form, count=1, form=form, pool=pool, asked=asked).examples_of(asked[0])
        for form in ("slotless", "whole")
    ]
    assert first == [(pool[4],), (pool[3],)]
    (left,) = without_slots([Example("0", {"question": "< hot >"})])
    assert left.text == "< hot >"  # nothing else is left of it


def test_every_system_stands_behind_them(tmp_path):
    prompt = chosen(tmp_path)
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        memory = MemPrompt(load_family("lexical"), prompt, log, EditLookup(log), -5.0)
        assert memory.ask(step(ASKED[0])).text == NoMemory(prompt).ask(step(ASKED[0])).text
        memory.learn(step(ASKED[0]))
        asked = memory.ask(step(ASKED[0])).text
        assert asked == prompt.write(ASKED[0], feedback="I want an antonym")
        assert asked.startswith(POOL[1].question)
        recalling = MemPrompt(load_family("webquestions"), prompt, log, EditLookup(log), None)
        # One of the two examples gives way to the question that was answered wrongly.
        text = recalling.ask(step(ASKED[0])).text
        assert text.startswith(POOL[1].question)
        assert POOL[0].question not in text
    growing = GrowPrompt(PromptedLM(few_shot=prompt, completer=FollowingLM()))
    growing.learn(step("q"))
    shown = PromptExample("q", "the antonym for w is v", "I want an antonym")
    assert growing.ask(step(ASKED[1])).text == prompt.write(ASKED[1], more=[shown])
    assert chosen(tmp_path).fingerprint != PLAIN.fingerprint


def test_a_pool_is_read_with_answers_or_an_answer(tmp_path):
    lines = [{"question": "q", "answers": ["a", "b"]}, {"question": "r", "answer": "c"}]
    lines.append({"question": "s", "answer": "d", "feedback": "f"})
    path = write_jsonl(tmp_path / "pool.jsonl", lines)
    assert read_pool(path) == [
        PromptExample("q", "a"),
        PromptExample("r", "c"),
        PromptExample("s", "d", "f"),
    ]


def test_what_is_no_example_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "pool.jsonl", [{"question": "q", "answers": []}])
    with pytest.raises(DataError, match="line 1: answer is None, and must be text"):
        read_pool(path)


def test_a_stream_runs_behind_nearest_examples(tmp_path, lm_dirs, capsys):
    asked = [step(f"what is the reverse of < {word} > ?") for word in ("hot", "old")]
    path = write_stream(tmp_path / "stream.jsonl", [replace(s, word="w") for s in asked])
    words = ["memory", "stream", "--family", "lexical", "--stream", str(path), "--device", "cpu"]
    words += ["--lm", str(lm_dirs["gpt2"]), "--artifacts_dir", str(tmp_path / "artifacts")]
    words += ["--max_new_tokens", "2", "--systems", "no-mem", "mem"]
    kate = ["--prefix", "kate", "--prefix_examples", "1", "--prefix_encoder", "bm25"]
    assert main([*words, *kate, "--output_dir", str(tmp_path / "kate")]) == 0
    assert (tmp_path / "kate" / "report.md").is_file()
    assert main([*words, "--output_dir", str(tmp_path / "kate")]) == 2
    assert "prompt_digest" in capsys.readouterr().err
