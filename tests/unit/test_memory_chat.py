"""A person's conversation with a memory: by itself, in a terminal, and in a pipe."""

import io
import sys

import pytest
from following_lm import AKIN, MEANT, FollowingLM, conversation, open_memory

from pgra.cli import main
from pgra.errors import visible
from pgra.memory import stream
from pgra.memory.chat import Talk, show_entry
from pgra.memory.log import MemoryEntry
from pgra.memory.stream import Simulation, Step


@pytest.fixture
def memory():
    with open_memory() as memory:
        yield memory


@pytest.fixture
def talk(memory):
    """Say lines to a memory; return what was answered."""

    def say(*lines):
        said = []
        Talk(conversation(memory), said.append, is_watched=True).run(lines)
        return "\n".join(said).splitlines()

    return say


def test_a_question_is_answered_corrected_and_asked_again(talk):
    told = talk(AKIN, f"/add {MEANT}")
    kept = f'"{AKIN}" -> "{MEANT}"'
    assert told == [
        "understood  the homonym for pretty is …",
        "answer      x",
        "memory      nothing found",
        f"noted, as entry 1: {kept}",
        "understood  the synonym for pretty is …",
        "answer      x",
        "memory      entry 1, score 0.0000 (gate -5), used",
        f"            {kept}",
    ]
    far = talk("make something with < fast > ?")
    assert far[2] == "memory      entry 1, score -14.0000 (gate -5), not used: too far"
    assert far[3] == f"            {kept}"
    assert talk("/list") == [f"     1  {kept}"]
    assert talk("/delete 1", "/list") == ["1 deleted", "nothing is in the memory"]


def test_a_person_gets_the_prompts_and_answers_of_the_simulated_user(memory):
    person = conversation(memory)
    memory.add(AKIN, MEANT)
    questions = [AKIN, "what is akin to < fast > ?", "expand on < fast > ?"]
    steps = [Step(q, "syn", q, MEANT, expected=("x",)) for q in questions]
    simulation = Simulation(family=person.system.family, lm=person.lm)
    outcomes = simulation.play(steps, person.system, probability=0.0, seed=0)
    turns = [person.ask(question) for question in questions]
    assert [(turn.output, turn.num_prompt_tokens, turn.prompt.num_used) for turn in turns] == [
        (step.generated, step.num_prompt_tokens, int(step.used_memory)) for step in outcomes
    ]
    assert [turn.prompt.num_used for turn in turns] == [1, 1, 0]


def test_what_is_not_seen_is_told_by_its_number_and_the_rest_stays():
    assert visible("a\u202eb\x1b[2J\U000e0041") == "a\\u202eb\\u001b[2J\\U000e0041"
    plain = "क्\u200dष <b> \n\t 😀 é \\u202e"
    assert visible(plain) == plain
    assert show_entry(MemoryEntry(question='a"\n\u2066', feedback="b")) == '"a\\"\\n\\u2066" -> "b"'


def test_a_pipe_is_a_script_that_ends_at_its_first_mistake(tmp_path, monkeypatch, capsys):
    typed = f"{AKIN}\n/add {MEANT}\n".encode() + b"caf\xe9\n/list\n"
    monkeypatch.setattr(stream, "open_lm", lambda *args: FollowingLM())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    assert main(["memory", "chat", "--lm", "following", "--memory", str(tmp_path / "m")]) == 2
    told, error = capsys.readouterr()
    assert error == "\npgra: error: that line is not UTF-8: give plain text\n"
    assert f'noted, as entry 1: "{AKIN}" -> "{MEANT}"\n' in told
    assert told.endswith("> caf\\udce9\n")
