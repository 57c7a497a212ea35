"""MemPrompt's prefix by KATE: each question's nearest examples, never the question itself."""

from dataclasses import replace

import pytest
from conftest import write_jsonl
from following_lm import FollowingLM, write_stream

from pgra.cli import main
from pgra.core import Example
from pgra.errors import ConfigError, DataError
from pgra.memory.experiment import StreamArguments
from pgra.memory.families import load_family
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import EditLookup, LookupArguments
from pgra.memory.nearest_examples import choose_examples, read_pool, without_slots
from pgra.memory.prompts import FewShot, PromptExample
from pgra.memory.stream import GrowPrompt, MemPrompt, NoMemory, PromptedLM, Step

POOL = [
    PromptExample("what is akin to < red > ?", "the synonym for red is scarlet"),
    PromptExample("what is the reverse of < up > ?", "the antonym for up is down"),
    PromptExample("say more about < owl > ?", "it is a bird", "I want a definition"),
    PromptExample("what sounds like < sea > ?", "the homonym for sea is see", "f"),
]
PLAIN = FewShot("mine", "\n#\n", "END", "{question} | {feedback}", tuple(POOL[:2]))
FORMS = ("slotless", "whole")
ASKED = [
    "what is the reverse of < hot > ?",
    "say more about < oak > ?",
    "what is akin to < red > ?",
]


def chosen(tmp_path, *, count=2, form="slotless", more=(), asked=ASKED):
    lines = [vars(shown) | {"feedback": shown.feedback or "f"} for shown in [*POOL[2:], *more]]
    pool = write_jsonl(tmp_path / "pool.jsonl", lines)
    kate = {"prefix": "kate", "prefix_examples": count, "prefix_encoder": "bm25"}
    place = {"artifacts_dir": str(tmp_path), "device": "cpu"}
    args = StreamArguments(stream="x", prefix_pool=str(pool), **kate, **place)
    return choose_examples(PLAIN, asked, args, LookupArguments(key_form=form))


def step(question):
    return Step("0", "ant", question, "I want an antonym", expected=("the antonym for w is v",))


def test_each_question_has_its_nearest_first_and_is_never_shown_itself(tmp_path):
    prompt = chosen(tmp_path)
    assert prompt.examples_of(ASKED[0]) == (POOL[1], POOL[0])
    assert prompt.examples_of(ASKED[1]) == (POOL[2], POOL[0])
    assert prompt.write(ASKED[1]).startswith("say more about < owl > ? | I want a definition\n#\n")
    # Another question has the prompt's own ones, as all have without KATE.
    assert prompt.write("else") == PLAIN.write("else")
    shown = chosen(tmp_path, count=3).examples_of(ASKED[2])
    assert (len(shown), POOL[0] in shown) == (3, False)


def test_one_question_with_two_answers_is_two_examples(tmp_path):
    other = replace(POOL[2], answer="say more about means the definition")
    shown = chosen(tmp_path, more=[other, POOL[0]]).examples_of(ASKED[1])
    assert shown == (POOL[2], other)
    with pytest.raises(ConfigError, match=f"there are {len(POOL) + 1} different examples"):
        chosen(tmp_path, more=[other, POOL[0]], count=len(POOL) + 2)


def test_the_word_asked_about_does_not_count_unless_asked_for(tmp_path):
    more = [PromptExample("tell me now please < ash > ?", "a", "f")]
    asked = ["tell < sea > ?"]  # "sea" stands in the shorter example
    how = {"count": 1, "more": more, "asked": asked}
    first = [chosen(tmp_path, form=form, **how).examples_of(asked[0]) for form in FORMS]
    assert first == [(more[0],), (POOL[3],)]
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
    path = write_jsonl(tmp_path / "pool.jsonl", [*lines, lines[1] | {"feedback": "f"}])
    shown = [("q", "a"), ("r", "c"), ("r", "c", "f")]
    assert read_pool(path) == [PromptExample(*texts) for texts in shown]
    path = write_jsonl(tmp_path / "pool.jsonl", [*lines, {"question": "q", "answers": []}])
    with pytest.raises(DataError, match="line 3: answers is .*, and must be text"):
        read_pool(path)


def test_a_stream_runs_behind_nearest_examples(tmp_path, lm_dirs, capsys):
    asked = [step(f"what is the reverse of < {word} > ?") for word in ("hot", "old")]
    path = write_stream(tmp_path / "stream.jsonl", [replace(s, word="w") for s in asked])
    words = ["memory", "stream", "--stream", str(path), "--device", "cpu", "--max_new_tokens", "2"]
    words += ["--lm", str(lm_dirs["gpt2"]), "--artifacts_dir", str(tmp_path / "artifacts")]
    words += ["--systems", "no-mem", "mem", "--output_dir", str(tmp_path / "kate")]
    kate = ["--prefix", "kate", "--prefix_examples", "1", "--prefix_encoder", "bm25"]
    assert main([*words, *kate]) == 0
    assert (tmp_path / "kate" / "report.md").is_file()
    assert main(words) == 2
    assert "prompt_digest" in capsys.readouterr().err
