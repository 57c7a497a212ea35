import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_training import signal_self

from pgra.reader.stopping import Stopper

TWICE = """
import os, signal, sys
from pgra.reader.stopping import Stopper
stopper = Stopper()
with stopper.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    print(stopper.code, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""


def test_a_signal_is_heard_only_meanwhile():
    before = signal.getsignal(signal.SIGTERM)
    stopper = Stopper()
    with stopper.listening():
        signal_self(signal.SIGTERM)()
        assert (stopper.code, stopper.wish) == (143, 143)
    assert signal.getsignal(signal.SIGTERM) == before
    assert Stopper().wish == 0


def test_what_a_launcher_passes_on_is_one_signal():
    stopper = Stopper(world=2)
    with stopper.listening():
        signal_self(signal.SIGTERM)()
        signal_self(signal.SIGTERM)()
    assert stopper.code == 143


def test_time_is_up_when_it_is():
    assert Stopper(minutes=60).wish == 0
    stopper = Stopper(minutes=1e-6)
    time.sleep(0.001)
    assert stopper.wish == 124


def test_another_thread_leaves_signals_alone():
    found = []

    def listen():
        with Stopper().listening():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.slow
def test_a_second_signal_leaves_at_once():
    done = subprocess.run(
        [sys.executable, "-c", TWICE],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "143\n"
    assert done.returncode == -signal.SIGTERM
