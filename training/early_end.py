"""A run that ends before its last step: told to by a signal, as schedulers do before they take a machine away, or out
of its `train.max_minutes`.

The step that runs is finished, a checkpoint of it is written where the recipe names a folder, and the command ends with
exit code `ASK_AGAIN`; the same command goes on from there. Ranks hear at different times, or one of them alone: what
each has heard travels with what they compare after every step, so all end after the same one. A second signal ends the
process at once. Before the first step and after the last nobody listens, and a signal ends it as usual.

A thread takes the signals: Python runs handlers between two lines of the main thread, which may wait in a collective.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.recipe.recipe import Recipe

logger = logging.getLogger("evenload")

ASK_AGAIN = 75
"""Exit code of a run that ended early and can go on (EX_TEMPFAIL of sysexits.h)."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AT_ONCE_S = 2.0
"""A launcher and a scheduler may both pass the same signal on: what comes within this time is one request."""
NOTHING_HEARD = 0
_OUT_OF_TIME = 1000
BEGAN = "EVENLOAD_BEGAN_S"
"""Tells the ranks of a launcher when its command began, by the machine's monotonic clock."""
BEGAN_S = float(os.environ.get(BEGAN) or time.monotonic())
"""`launching.launch` imports this before anything that takes long."""


class EarlyEnd:
    """What this rank has heard. ``max_minutes``: of the command; None sets no limit."""

    def __init__(self, max_minutes: float | None = None) -> None:
        self._until_s = None if max_minutes is None else BEGAN_S + 60 * max_minutes
        self.signal = NOTHING_HEARD

    def stop_code(self, step_s: float) -> int:
        """A number for the other ranks: the signal's, one of its own where ``step_s`` seconds more are too many."""
        late = self._until_s is not None and time.monotonic() + step_s > self._until_s
        return self.signal or (_OUT_OF_TIME if late else NOTHING_HEARD)


def reason_of(stop_code: float) -> str:
    """The largest number that ranks have heard, in words; empty where none has heard anything."""
    if stop_code == _OUT_OF_TIME:
        return "train.max_minutes"
    return signal.Signals(int(stop_code)).name if stop_code else ""


@contextmanager
def listening(recipe: Recipe) -> Iterator[EarlyEnd]:
    """Inside, the first of `SIGNALS` is noted, and a second one ends the process."""
    ending = EarlyEnd(recipe.train.max_minutes)
    if threading.current_thread() is not threading.main_thread():  # it alone may handle signals
        yield ending
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    former = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    thread = threading.Thread(target=_take, args=(reads, ending), name="early-end", daemon=True)
    thread.start()
    try:
        yield ending
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writes)  # which ends the thread
        thread.join()
        os.close(reads)


def _take(reads: int, ending: EarlyEnd) -> None:
    first_s = 0.0
    while numbers := os.read(reads, 1):
        number = numbers[0]
        if number not in SIGNALS:
            continue
        if not ending.signal:
            first_s, ending.signal = time.monotonic(), number
            logger.warning("%s: the run ends after this step", signal.Signals(number).name)
        elif time.monotonic() - first_s > AT_ONCE_S:
            os._exit(128 + number)


def say_ended(reason: str, steps: int, recipe: Recipe) -> None:
    """Tell why a run has ended after so many steps, and how it goes on."""
    kept = "the same command goes on" if recipe.checkpoint.dir else "nothing is kept, as checkpoint.dir is null"
    logger.warning("the run has ended after %d steps (%s); %s", steps, reason, kept)
