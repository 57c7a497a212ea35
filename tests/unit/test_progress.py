"""Bars on a terminal, in a log and where nothing shall be said."""

import io
import logging
import re

import pytest
from conftest import SENTENCES

import pgra
from pgra.progress import Bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def count(monkeypatch):
    """Count to 40 under a bar, in a fifth of a second, and return what stood on stderr."""
    monkeypatch.setattr(logging.getLogger("pgra"), "level", logging.INFO)

    def count(stream, seconds, **how):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(Bar, "seconds", seconds)
        monkeypatch.setattr(Bar, "delay", 0.0)
        now = [0.0]
        monkeypatch.setattr("tqdm.std.time", lambda: now[0])
        with Bar(total=40, desc="train", unit="step", **how) as bar:
            for _ in range(40):
                now[0] += 0.005
                bar.set_postfix(loss="0.530", refresh=False)
                bar.update()
            bar.tell("step 40: dev accuracy 0.5")
        return stream.getvalue()

    return count


def test_a_log_gets_a_line_for_each_half_minute_with_name_rate_and_loss(count):
    told = count(io.StringIO(), 0.05)
    assert "\r" not in told
    *lines, dev, last = told.splitlines()
    assert 2 <= len(lines) <= 4  # of a fifth of a second, one for each twentieth
    for line in (*lines, last):
        assert re.fullmatch(r"train: \d+/40 in 00:00, [\d.]+step/s, loss=0.530", line)
    assert (dev, last[:12]) == ("step 40: dev accuracy 0.5", "train: 40/40")


def test_long_work_from_python_shows_the_bars_of_the_command_line(lm_dirs, monkeypatch):
    texts = []
    for level, delay in ((logging.NOTSET, 0.0), (logging.ERROR, 0.0), (logging.NOTSET, 60.0)):
        monkeypatch.setattr(Bar, "delay", delay)
        monkeypatch.setattr(logging.getLogger("pgra"), "level", level)
        monkeypatch.setattr("sys.stderr", stream := Terminal())
        pgra.Reranker(str(lm_dirs["gpt2"]), template="{text}").rank("a film", SENTENCES)
        texts.append(stream.getvalue())
    assert re.search(r"(encode|read): .*\d+/1\d", texts[0])
    assert texts[1:] == ["", ""]  # the controls: the one switch, and what is soon done
