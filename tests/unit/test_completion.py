"""The scripts that complete commands and flags, run by a real bash."""

import shutil
import subprocess

import pytest

from pgra.cli import main

_ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_pgra pgra "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
echo "${COMPREPLY[@]}"
"""
COMPLETED = {
    ("re",): {"rerank", "report"},
    ("memory", "lo"): {"lookup"},
    ("index", "search", "--enc"): {"--encoder", "--encoder_dtype", "--encoder_batch_tokens"},
    ("train", "--learning"): {"--learning_rate"},
    ("train", "--retriever", "bm"): {"bm25"},
    ("push", "--learning"): set(),  # the control: a flag of another command
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_words_below_flags_and_names(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "pgra.bash"
    script.write_text(capsys.readouterr().out)
    for words, wanted in COMPLETED.items():
        ask = ["bash", "-c", _ASK, "ask", str(script), "pgra", *words]
        told = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        assert set(told.split()) == wanted, words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fish"], "unknown shell 'fish'. Known: bash, tcsh, zsh."),
        (["bash", "more"], "unknown argument 'more'"),
    ],
)
def test_what_is_no_shell_is_refused(words, message, capsys):
    assert main(["completion", *words]) == 2
    assert message in capsys.readouterr().err
