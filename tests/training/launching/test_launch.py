"""The launcher is told to end."""

import os
import signal
import time

import pytest
from evenload.training.launching import processes
from evenload.training.launching.processes import terminable


class RankOfTest:
    """What the launcher sees of a rank."""

    def __init__(self):
        self.sent = []

    def send_signal(self, number):
        self.sent.append(number)


def tell(number, wait_s=10.0):
    os.kill(os.getpid(), number)
    time.sleep(wait_s)


@pytest.fixture(autouse=True)
def _handlers():
    """As in a process of its own; under nohup a hang-up is ignored from the start."""
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_there_are_ranks_unwinds_the_launcher(number):
    with pytest.raises(SystemExit) as ended, terminable([]):
        tell(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_ranks_are_told_once_and_a_later_signal_unwinds_the_launcher(monkeypatch):
    monkeypatch.setattr(processes, "AT_ONCE_S", 0.2)
    ranks = [RankOfTest(), RankOfTest()]
    with terminable(ranks) as passed_on:
        tell(signal.SIGUSR1, 0.05)
        tell(signal.SIGTERM, 0.3)  # the same request
        assert passed_on == [signal.SIGUSR1]
        assert [rank.sent for rank in ranks] == [[signal.SIGUSR1]] * 2
        with pytest.raises(SystemExit) as ended:
            tell(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_terminal_that_closes_ends_at_once():
    ranks = [RankOfTest()]
    with pytest.raises(SystemExit) as ended, terminable(ranks):
        tell(signal.SIGHUP)
    assert ended.value.code == 128 + signal.SIGHUP
    assert ranks[0].sent == []


def test_a_hang_up_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable([]):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
