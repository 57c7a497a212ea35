"""Bars on a terminal, in a log and where nothing shall be said."""

import io
import logging
import re

from conftest import SENTENCES

import pgra
from pgra.progress import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_long_work_from_python_shows_the_bars_of_the_command_line(lm_dirs, monkeypatch):
    texts = []
    for level, delay in ((logging.NOTSET, 0.0), (logging.ERROR, 0.0), (logging.NOTSET, 60.0)):
        monkeypatch.setattr(Bar, "delay", delay)
        monkeypatch.setattr(logging.getLogger("pgra"), "level", level)
        monkeypatch.setattr("sys.stderr", stream := Terminal())
        pgra.Reranker(str(lm_dirs["gpt2"]), template="{text}").rank("a film", SENTENCES)
        texts.append(stream.getvalue())
    assert re.search(r"read: .*\d+/1\d", texts[0])
    assert texts[1:] == ["", ""]  # the controls: the one switch, and what is soon done
