"""The launcher is told to end."""

import os
import signal
import time

import pytest
from evenload.training.launching.launch import _terminable


def tell(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_unwinds_the_launcher_so_that_it_ends_its_ranks(number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup a hang-up is ignored from the start
    try:
        with pytest.raises(SystemExit) as ended, _terminable():
            tell(number)
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
