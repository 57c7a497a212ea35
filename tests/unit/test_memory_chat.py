"""`pgra memory chat`: a terminal, a pipe, and what is left when either ends."""

import contextlib
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest
from following_lm import conversation

from pgra.cli import main
from pgra.errors import ConfigError, DataError
from pgra.memory.chat import Talk
from pgra.memory.log import FeedbackLog

ROOT = Path(__file__).parents[2]
AKIN, MEANT = "what is akin to < pretty > ?", "when I ask for akin to, I want a synonym"


@pytest.fixture
def talk(tmp_path):
    """Say lines to a memory; give what was answered."""
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:

        def say(*lines, is_watched=True):
            said = []
            Talk(conversation(log), said.append, is_watched=is_watched).run(lines)
            return "\n".join(said).splitlines()

        say.log = log
        yield say


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


MISTAKES = [
    ("/prompt", DataError, "nothing was asked yet: type a question first"),
    ("/forget x", DataError, "name entries by their numbers, as /list shows them: /forget 7 9"),
    ("caf\udce9", DataError, "that line is not UTF-8: give plain text"),
    ("/corect x", ConfigError, "unknown command '/corect'. Did you mean '/correct'?"),
]


@pytest.mark.parametrize(("line", "kind", "message"), MISTAKES)
def test_a_mistake_ends_a_script_and_is_told_to_a_person_who_goes_on(talk, line, kind, message):
    told = talk(line, "/list")
    assert told[0].startswith("! ")
    assert message in told[0]
    assert told[1:] == ["nothing is in the memory"]
    with pytest.raises(kind, match=message.replace("?", "[?]")):
        talk(line, "/list", is_watched=False)


def test_help_names_every_command_and_quit_leaves(talk):
    told = "\n".join(talk("/help", "", "  ", "/quit", "/list"))
    for word in ("/correct TEXT", "/forget ID", "/list", "/prompt", "/quit"):
        assert word in told
    assert "nothing is in the memory" not in told


def test_what_cannot_be_begun_is_one_line_and_makes_no_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("other.txt").write_text("no memory " * 100)
    assert main(["memory", "chat", "--memory", "other.txt"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 2)
    assert "other.txt is damaged" in err
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]


# The pseudo-terminal is made the process's own, so that Ctrl-C in it is a signal.
TERMINAL = f"""
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's `&`
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.path.insert(0, {str(ROOT / "tests" / "unit")!r})
from pathlib import Path
from following_lm import conversation
from pgra.cli import run
from pgra.commands.common import say
from pgra.commands.memory import read_lines
from pgra.memory.chat import Talk
from pgra.memory.log import FeedbackLog
def main(argv):
    with FeedbackLog.open(Path(argv[0])) as log:
        Talk(conversation(log), say, is_watched=sys.stdin.isatty()).run(read_lines())
    return 0
sys.exit(run(main, sys.argv[1:]))
"""


def read_until(terminal, wanted):
    told = b""
    while wanted not in told:
        assert select.select([terminal], [], [], 60)[0], told
        told += os.read(terminal, 65536)
    return told.decode()


def ended_by(terminal, key, process):
    """Press a key until the process ends.

    Ctrl-C while Python is not yet waiting for a key is seen with another one only.
    """
    try:
        for _ in range(30):
            os.write(terminal, key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=1)
            if key == b"\x03":
                os.write(terminal, b"x")
                read_until(terminal, b"x")
    finally:
        process.kill()
        process.wait()
    return None


@pytest.mark.parametrize(("last", "code"), [(b"\x03", 130), (b"\x04", 0)])
def test_in_a_terminal_ctrl_c_and_ctrl_d_leave_and_what_was_noted_stands(tmp_path, last, code):
    path, (terminal, inside) = tmp_path / "memory.sqlite", pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, str(path)],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment,
        start_new_session=True,
    )
    os.close(inside)
    read_until(terminal, b"> ")
    os.write(terminal, f"/correct x\n{AKIN}\n/correct {MEANT}\n".encode())
    told = read_until(terminal, b'a synonym"\r\n> ')
    assert "entry 1, score 0.0000 (gate -5), used" in told
    assert "! nothing was asked yet" in told
    assert "the synonym for pretty is" in told
    if code:
        os.write(terminal, b"half a correct")
        read_until(terminal, b"half a correct")
    assert ended_by(terminal, last, process) == code
    os.close(terminal)
    with FeedbackLog.open(path, is_writable=False) as log:
        log.verify()
        assert [(entry.key, entry.feedback) for entry in log.entries()] == [(AKIN, MEANT)]


@pytest.mark.slow
def test_a_pipe_is_a_script_on_a_real_lm_that_ends_at_its_first_mistake(tmp_path):
    from tiny_models import build_lm

    lm = build_lm(tmp_path / "lm", "llama", window=4096)
    words = ["memory", "chat", "--lm", str(lm), "--device", "cpu", "--max_new_tokens", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "pgra", *words, "--max_prompt_tokens", "4000"],
        input=f"{AKIN}\n/correct {MEANT}\n/list\n/forget 9\n/list\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pgra: error: memory.sqlite has no entry 9 now")
    assert "Traceback" not in done.stderr
    kept = f'"{AKIN}" -> "{MEANT}"'
    told = done.stdout.splitlines()
    assert told[0].startswith("memory.sqlite: 0 entries; LM ")
    assert f"> {AKIN}" in told
    assert "memory      nothing found" in told
    assert f"noted, as entry 1: {kept}" in told
    assert "memory      entry 1, score 0.0000 (gate -5), used" in told
    assert told[-1] == "> /forget 9"
    with FeedbackLog.open(tmp_path / "memory.sqlite", is_writable=False) as log:
        assert [entry.feedback for entry in log.entries()] == [MEANT]
