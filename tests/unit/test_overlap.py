"""Three steps side by side: what overlaps, what stays in order, and what an error ends."""

import threading
import time
import weakref

import pytest

from pgra.rerank.bank import run_overlapped

PATIENCE = 10  # seconds; only a failing test waits so long


def test_results_come_in_order_and_each_step_sees_every_unit_once():
    seen = {"prepare": [], "compute": [], "keep": []}

    def prepare(unit):
        seen["prepare"].append(unit)
        return unit * 10

    def compute(ready):
        seen["compute"].append(ready)
        return ready + 1

    def keep(unit, value):
        seen["keep"].append((unit, value))
        return value

    assert run_overlapped([3, 1, 2], prepare, compute, keep=keep) == [31, 11, 21]
    assert seen["prepare"] == [3, 1, 2]
    assert seen["compute"] == [30, 10, 20]
    assert seen["keep"] == [(3, 31), (1, 11), (2, 21)]
    assert run_overlapped([], prepare, compute, keep=keep) == []


def test_the_next_is_read_and_the_last_is_kept_while_this_one_runs():
    read_2, running_1, kept_0 = threading.Event(), threading.Event(), threading.Event()

    def prepare(unit):
        if unit == 2:
            read_2.set()
        return unit

    def compute(unit):
        if unit == 1:
            running_1.set()
            assert read_2.wait(PATIENCE)
            assert kept_0.wait(PATIENCE)
        return unit

    def keep(unit, _):
        if unit == 0:
            assert running_1.wait(PATIENCE)
            kept_0.set()

    run_overlapped(range(4), prepare, compute, keep=keep)


def test_the_first_unit_runs_before_the_second_is_read():
    events = []

    def compute(unit):
        time.sleep(0.02)  # time enough for another thread to go ahead
        events.append(("compute", unit))
        return unit

    run_overlapped(
        range(3),
        lambda unit: events.append(("prepare", unit)) or unit,
        compute,
        keep=lambda *_: None,
    )
    assert events[:3] == [("prepare", 0), ("compute", 0), ("prepare", 1)]
    assert events.index(("prepare", 2)) < events.index(
        ("compute", 1)
    )  # control: from then on ahead


def test_no_more_than_two_values_live_at_once():
    class Value:
        pass

    alive, most = weakref.WeakSet(), []

    def compute(_):
        time.sleep(0.01)
        value = Value()
        alive.add(value)
        most.append(len(alive))
        return value

    run_overlapped(range(6), int, compute, keep=lambda *_: time.sleep(0.002))
    assert max(most) == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["prepare", "compute", "keep"])
def test_an_error_in_any_step_ends_all(step, error):
    kept = []

    def broken(name):
        def run(unit, value=None):
            if name == step and unit == 3:
                raise error("broken")
            if name == "keep":
                kept.append(unit)
            return unit

        return run

    with pytest.raises(error, match="broken"):
        run_overlapped(range(9), broken("prepare"), broken("compute"), keep=broken("keep"))
    assert kept == [0, 1, 2]  # whole, and none after it
