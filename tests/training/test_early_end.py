"""A run is told to end before its last step."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from evenload.api import load_recipe
from evenload.training import early_end
from evenload.training.early_end import EarlyEnd, listening, reason_of

RECIPE = load_recipe("quickstart")
TWICE = """
import os, signal, time
from evenload.api import load_recipe
from evenload.training import early_end

early_end.AT_ONCE_S = 0.2
with early_end.listening(load_recipe("quickstart")) as ending:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    assert ending.stop_code(0.0) == signal.SIGTERM
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(20)
"""


def heard_within(ending, seconds):
    until_s = time.monotonic() + seconds
    while not ending.stop_code(0.0) and time.monotonic() < until_s:
        time.sleep(0.01)
    return ending.stop_code(0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_the_handlers_of_before_come_back(number):
    before = signal.getsignal(number)
    with listening(RECIPE) as ending:
        assert ending.stop_code(1e9) == 0
        os.kill(os.getpid(), number)
        assert heard_within(ending, 5.0) == number
    assert signal.getsignal(number) == before
    assert "early-end" not in [thread.name for thread in threading.enumerate()]


def test_one_request_may_come_twice_at_once():
    with listening(RECIPE) as ending:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard_within(ending, 5.0) == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert ending.stop_code(0.0) == signal.SIGTERM


def test_a_second_signal_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (128 + signal.SIGUSR1, "goes on\n"), done.stderr


def test_no_step_begins_that_might_end_behind_the_limit(monkeypatch):
    monkeypatch.setattr(early_end, "BEGAN_S", time.monotonic() - 50.0)
    ending = EarlyEnd(max_minutes=1.0)
    assert ending.stop_code(step_s=5.0) == 0
    assert reason_of(ending.stop_code(step_s=15.0)) == "train.max_minutes"


def test_the_minutes_of_a_rank_are_those_of_the_command_that_started_it():
    code = "from evenload.training.early_end import EarlyEnd; print(EarlyEnd(1.0).stop_code(0.0))"
    environment = {**os.environ, early_end.BEGAN: str(time.monotonic() - 61.0)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1000\n", "")
