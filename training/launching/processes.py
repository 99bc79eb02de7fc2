"""Processes of ranks on this machine: how they are started, told to end, and seen to stand still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...runtime.watchdog.store_socket import STORE_SOCKET
from ..early_end import AT_ONCE_S, SIGNALS

LOOK_S = 0.1
REAP_S = 5.0
"""How long a killed rank may take to be gone."""


class RanksFailed(SystemExit):
    """Ranks have ended with this exit code, and have said why."""


@contextmanager
def terminable(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """A job that is told to end (a scheduler's signal, a terminal that closes) ends its ranks and leaves no file.

    Gives the signals that were passed on: the ranks end as `early_end` says. A second one, or a terminal that
    closes, ends them at once.
    """
    passed_on: list[int] = []
    passed_s = 0.0

    def tell(number: int, _: object) -> None:
        nonlocal passed_s
        if number not in SIGNALS or not ranks:
            raise SystemExit(128 + number)
        if passed_on:
            if time.monotonic() - passed_s < AT_ONCE_S:
                return
            raise SystemExit(128 + number)
        passed_s = time.monotonic()
        passed_on.append(number)
        for rank in ranks:
            rank.send_signal(number)

    # What is ignored stays so: nohup.
    numbers = [n for n in (*SIGNALS, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # it alone may handle signals
    for number in numbers:
        signal.signal(number, tell)
    try:
        yield passed_on
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def start_rank(
    arguments: Sequence[str],
    rank: int,
    num_ranks: int,
    shared: dict[str, str],
    of_first: dict[str, socket.socket],
    num_here: int,
) -> subprocess.Popen[bytes]:
    """One rank of a world on this machine, which runs ``num_here`` in all."""
    passed = {name: one.fileno() for name, one in of_first.items()} if rank == 0 else {}
    threads = str(max(1, (os.cpu_count() or 1) // num_here))
    environment = {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(of_first[STORE_SOCKET].getsockname()[1]),
        **shared,
        **{name: str(number) for name, number in passed.items()},
    }
    command, output = [sys.executable, "-m", "evenload", *arguments], 2  # also where Python's stderr is another
    pass_fds = tuple(passed.values())
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, pass_fds=pass_fds)


def is_stopped(rank: subprocess.Popen[bytes]) -> bool:
    """Whether a signal or a debugger keeps a running process from moving (Linux: /proc; elsewhere never)."""
    if rank.returncode is not None:
        return False
    try:
        return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False
