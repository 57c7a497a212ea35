"""A person's conversation with a memory: by itself, in a terminal, and in a pipe."""

import io
import os
import pty
import select
import sys
import time
from pathlib import Path

import following_lm
import pytest
from following_lm import AKIN, MEANT, FollowingLM, conversation

from pgra.cli import main
from pgra.errors import visible
from pgra.memory import stream
from pgra.memory.chat import Talk, show_entry
from pgra.memory.log import Event, FeedbackLog
from pgra.memory.stream import Simulation, Step

ROOT = Path(__file__).parents[2]


@pytest.fixture
def talk(log):
    """Say lines to a memory; return what was answered."""

    def say(*lines):
        said = []
        Talk(conversation(log), said.append, is_watched=True).run(lines)
        return "\n".join(said).splitlines()

    return say


def test_a_question_is_answered_corrected_and_asked_again(talk):
    told = talk(AKIN, f"/correct {MEANT}", "what is akin to < fast > ?")
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
        "understood  the synonym for fast is …",
        "answer      x",
        "memory      entry 1, score 0.0000 (gate -5), used",
        f"            {kept}",
    ]
    far = talk("make something with < fast > ?")
    assert far[2] == "memory      entry 1, score -14.0000 (gate -5), not used: too far"
    assert far[3] == f"            {kept}"
    assert talk("/list") == [f"     1  {kept}"]
    assert talk("/forget 1", "/list") == ["1 forgotten", "nothing is in the memory"]


@pytest.mark.parametrize("mistake", ["/prompt", "/forget x", "/corect x"])
def test_a_mistake_is_told_to_a_person_who_goes_on_until_quit(talk, mistake):
    told = talk(mistake, "", "/list", "/quit", "/list")
    assert told[0].startswith("! ")
    assert told[1:] == ["nothing is in the memory"]


def test_a_person_gets_the_prompts_and_answers_of_the_simulated_user(log):
    person = conversation(log)
    person.correct(AKIN, MEANT)
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
    assert show_entry(Event(key='a"\n\u2066', feedback="b")) == '"a\\"\\n\\u2066" -> "b"'


WORDS = [following_lm.__file__, "memory", "chat", "--lm", "following", "--memory"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}


def read_until(terminal, wanted):
    told = b""
    while wanted not in told:
        assert select.select([terminal], [], [], 60)[0], told
        told += os.read(terminal, 65536)
    return told.decode()


def press(terminal, key, process):
    """Press a key until the process ends.

    Ctrl-C while Python is not yet waiting for a key is seen with another one only.
    """
    for attempt in range(300):
        if attempt % 50 == 0:
            os.write(terminal, b"x" * (attempt > 0) + key)
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("last", "code"), [(b"\x03", 130), (b"\x04", 0)])
def test_in_a_terminal_ctrl_c_and_ctrl_d_leave_and_what_was_noted_stands(tmp_path, last, code):
    path = tmp_path / "memory.sqlite"
    process, terminal = pty.fork()
    if not process:
        os.execve(sys.executable, [sys.executable, *WORDS, str(path)], ENVIRONMENT)
    read_until(terminal, b"> ")
    os.write(terminal, f"/correct x\n{AKIN}\n/correct {MEANT}\n".encode())
    told = read_until(terminal, b'a synonym"\r\n> ')
    assert "entry 1, score 0.0000 (gate -5), used" in told
    assert "! nothing was asked yet" in told
    assert press(terminal, last, process) == code
    os.close(terminal)
    with FeedbackLog.open(path, is_writable=False) as log:
        log.verify()
        assert [(entry.key, entry.feedback) for entry in log.entries()] == [(AKIN, MEANT)]


def test_a_pipe_is_a_script_that_ends_at_its_first_mistake(tmp_path, monkeypatch, capsys):
    typed = f"{AKIN}\n/correct {MEANT}\n".encode() + b"caf\xe9\n/list\n"
    monkeypatch.setattr(stream, "open_lm", lambda *args: FollowingLM())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    assert main(["memory", "chat", "--lm", "following", "--memory", str(tmp_path / "m")]) == 2
    told, error = capsys.readouterr()
    assert error == "\npgra: error: that line is not UTF-8: give plain text\n"
    assert f'noted, as entry 1: "{AKIN}" -> "{MEANT}"\n' in told
    assert told.endswith("> caf\\udce9\n")
