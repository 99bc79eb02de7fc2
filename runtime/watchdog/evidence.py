"""Whether this process works, seen from outside: CPU seconds and bytes that it and its children use (Linux: /proc).

In a phase that sets no marks, such as the conversion of a checkpoint, this tells work that takes an hour from standing
still: a process that waits for a lock or a dead file server uses neither. What always ticks does not count: threads of
gloo (65 of them used 2.5 % of a core between two ranks that stood still), of NCCL and of the store, and the watchdog's
own. What counts must come to `CPU_SHARE` of a core or to `BYTES_PER_S` since the last look.

A thread that spins is taken for work, whatever it waits for: a rank that waits for its CUDA device often does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CPU_SHARE = 0.05
BYTES_PER_S = 16 * 1024

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
_BACKGROUND = ("gloo", "pt_tcpstore", "pt_nccl")
"""How the names of threads begin that poll while nothing is done."""


class Use(NamedTuple):
    """What a thread or a process has used since it began."""

    cpu_s: float
    num_bytes: int
    """Read and written, page cache and pipes included."""


class Meter:
    """Compares what was used with the look before."""

    def __init__(self) -> None:
        self._used = _all_uses()
        self._time_s = time.monotonic()

    def works(self) -> bool:
        """Whether this process or a child has worked since the last call."""
        before, self._used = self._used, _all_uses()
        start_s, self._time_s = self._time_s, time.monotonic()
        fresh = Use(0.0, 0)
        cpu_s = sum(use.cpu_s - before.get(path, fresh).cpu_s for path, use in self._used.items())
        num_bytes = sum(use.num_bytes - before.get(path, fresh).num_bytes for path, use in self._used.items())
        passed_s = self._time_s - start_s
        return cpu_s > CPU_SHARE * passed_s or num_bytes > BYTES_PER_S * passed_s


def descendants(pid: int) -> list[int]:
    """Process ids of all children, their children and so on; but not those of one that has ended."""
    pids = list(_children(pid))
    for child in pids:
        pids.extend(_children(child))
    return pids


def _all_uses() -> dict[Path, Use]:
    """By folder under /proc: the threads of this process that may work, and every child process."""
    watching = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("evenload-watchdog")}
    tasks = _PROC / "self" / "task"
    threads = [tasks / name for name in _names(tasks) if int(name) not in watching]
    paths = [path for path in threads if not _text(path / "comm").startswith(_BACKGROUND)]
    paths += [_PROC / str(child) for child in descendants(os.getpid())]
    return {path: use for path in paths if (use := _use(path)) is not None}


def _use(path: Path) -> Use | None:
    stat, io = _text(path / "stat").rpartition(")")[2].split(), _text(path / "io").split()
    if not stat:
        return None  # it has ended meanwhile
    # Fields 14 and 15 of proc_pid_stat(5), the first two being cut off.
    cpu_s = (int(stat[11]) + int(stat[12])) * _TICK_S
    num_bytes = sum(int(io[io.index(f"{name}:") + 1]) for name in ("rchar", "wchar")) if io else 0
    return Use(cpu_s, num_bytes)


def _children(pid: int) -> Iterator[int]:
    for name in _names(_PROC / str(pid) / "task"):
        yield from map(int, _text(_PROC / str(pid) / "task" / name / "children").split())


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
