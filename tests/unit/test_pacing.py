"""Calls keep to a limit a minute, and to the pauses that an endpoint asks for."""

import threading
import time

import pytest

from pgra.errors import ModelError
from pgra.lm import remote as pacing
from pgra.lm.remote import Halted, Hiccup, Pace, back_off, read_retry_after

DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
THEN = 1445412480.0  # that date, in seconds since the epoch


class Call:
    """Fails as often as it is told, then gives 7."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.times = []

    def __call__(self):
        self.times.append(time.monotonic())
        if self.failures:
            raise self.failures.pop(0)
        return 7


def patiently(call, *, pace=None, halt=None, max_retries=3):
    halt = halt or threading.Event()
    return (pace or Pace()).patiently(call, halt=halt, max_retries=max_retries)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *((None, None), ("2", 2.0), ("0.05", 0.05), ("-3", 0.0), ("soon", None), ("nan", None)),
        *((DATE, 20.0), ("inf", None)),
    ],
)
def test_a_wish_is_seconds_or_a_date(header, seconds):
    assert read_retry_after(header, now=THEN - 20) == seconds


def test_pauses_double_up_to_a_minute():
    for tried, whole in [(0, 0.5), (1, 1.0), (4, 8.0), (20, 60.0)]:
        assert 0.75 * whole <= back_off(tried) <= whole


def test_a_hiccup_is_tried_again_after_the_pause_that_is_wished():
    call = Call(Hiccup("busy", 0.05), Hiccup("busy", 0.05))
    pace = Pace()
    assert patiently(call, pace=pace) == 7
    gaps = [after - before for before, after in zip(call.times, call.times[1:], strict=False)]
    assert len(gaps) == 2
    assert min(gaps) >= 0.05
    assert pace.num_retries == 2


def test_without_a_wish_the_pause_grows(monkeypatch):
    monkeypatch.setattr(pacing, "_FIRST_DELAY", 0.02)
    call = Call(Hiccup("down"), Hiccup("down"))
    patiently(call)
    first, second = call.times[1] - call.times[0], call.times[2] - call.times[1]
    assert first >= 0.015
    assert second >= 0.03


def test_the_last_try_gives_up_and_counts_the_tries():
    call = Call(*[Hiccup("it is down", 0.0)] * 9)
    with pytest.raises(ModelError, match=r"^it is down \(3 tries\)$"):
        patiently(call, max_retries=2)
    assert len(call.times) == 3


def test_too_long_a_wish_is_left_to_the_user():
    call = Call(Hiccup("429", 3600.0))
    with pytest.raises(ModelError, match=r"^429, and asks to wait 3600 s$"):
        patiently(call)
    assert len(call.times) == 1


def test_other_errors_are_not_tried_again():
    call = Call(ModelError("no such model"))
    with pytest.raises(ModelError, match="no such model"):
        patiently(call)
    assert len(call.times) == 1


def test_a_limit_spreads_calls_evenly_over_threads():
    def starts(pace):
        call = Call()
        threads = [threading.Thread(target=patiently, args=(call,), kwargs={"pace": pace})]
        threads += [threading.Thread(target=patiently, args=(call,), kwargs={"pace": pace})]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        patiently(call, pace=pace)
        return sorted(call.times)

    limited = starts(Pace(60 / 0.05))  # one in 0.05 s
    assert limited[1] - limited[0] >= 0.045
    assert limited[2] - limited[1] >= 0.045
    spans = (times[2] - times[0] for times in (starts(Pace()) for _ in range(20)))
    assert any(span < 0.09 for span in spans)  # the control, on a machine that may stall


def test_a_pause_holds_the_other_calls_too():
    pace, call = Pace(), Call()
    start = time.monotonic()
    assert pace.hold(0.06)
    assert not pace.hold(0.01)  # which ends before
    patiently(call, pace=pace)
    assert call.times[0] - start >= 0.06


def test_a_halt_ends_a_pause_at_once():
    pace, halt, call = Pace(), threading.Event(), Call(Hiccup("busy", 30.0))
    threading.Timer(0.05, halt.set).start()
    start = time.monotonic()
    with pytest.raises(Halted):
        patiently(call, pace=pace, halt=halt)
    assert time.monotonic() - start < 5
    assert len(call.times) == 1
