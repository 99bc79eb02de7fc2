"""How a process of a failed job ends: within seconds, whatever else hangs.

Nothing on the way out is waited for without a limit: not the store, which may be frozen, not stderr, which may be a
full pipe that nobody reads, not a file on a dead disk.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from .marks import MARKS
from .store_client import StoreClient, within

_WRITE_S = 5.0
"""For each of: printing, torchrun's record, flushing."""
_COURTESY_S = 1.0
"""torchrun takes the first rank that exits for the culprit, so the others hold back for this long."""
_FAREWELL_S = 10.0
"""How long the rank that holds the store waits for the others to read from it before it ends."""
_STRAGGLE_S = 5.0
"""The same, since another one left last."""
_LINGER_S = 4.0
"""How long the rank that speaks for its node stays after that, in a folder that nobody else will clear: the others
notice a second or two apart, and must find its claim."""

_claims: list[Path] = []
"""Files that this process has to take away."""


def end_process(text: str, culprit: BaseException | None, code: int, farewell: Callable[[], None] | None) -> NoReturn:
    """Print, tell torchrun, take leave, end.

    Args:
        text: for stderr; empty where another rank prints.
        culprit: what torchrun shall report as its root cause; None where that is another rank's.
        farewell: what to do while the store still lives.
    """
    if text:
        within(_WRITE_S, lambda: print(text, file=sys.stderr, flush=True))
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        if culprit is not None:
            within(_WRITE_S, lambda: get_error_handler().record_exception(culprit))
        else:
            time.sleep(_COURTESY_S)
    if farewell is not None:
        within(_FAREWELL_S, farewell)
    for child in active_children():
        child.terminate()  # an orphan would keep our output open, and whoever reads it waiting
    within(_WRITE_S, _flush)
    if _claims:
        time.sleep(_LINGER_S)
        within(_WRITE_S, _withdraw)
    os._exit(code)


def take_leave(store: StoreClient, *, waits: bool, num_ranks: int) -> None:
    """Count this rank as one that has read the failure.

    Args:
        waits: this rank holds the store, so it stays until all others have read from it, or have stopped coming.
        num_ranks: how many will come.
    """
    ended, since_s = store.count("ended", 1), time.monotonic()
    while waits and ended < num_ranks and time.monotonic() - since_s < _STRAGGLE_S:
        time.sleep(0.05)
        before, ended = ended, store.count("ended", 0)
        if ended > before:
            since_s = time.monotonic()


def first_here(job: str) -> bool:
    """Whether this process is the first of its node to ask, for a job in which ranks cannot ask each other any more.
    ``job``: a name that no other job has; where it is empty the answer is yes."""
    return not job or within(_WRITE_S, lambda: _claims_first(f"evenload-{job}")) is not False


def _claims_first(name: str) -> bool:
    """Whether there was no such file in the folder that the ranks of a node share; there is one then. The folder is the
    launcher's, torchrun's for this attempt, or the system's."""
    launcher, torchrun = os.environ.get(MARKS), os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = Path(launcher) if launcher else Path(torchrun).parents[1] if torchrun else Path(tempfile.gettempdir())
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    if not (launcher or torchrun):
        _claims.append(folder / name)
    return True


def _withdraw() -> None:
    for path in _claims:
        path.unlink()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
