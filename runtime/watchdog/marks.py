"""Where each rank of this machine is, in memory that outlives the rank: to the very mark, also after a SIGKILL.

Heartbeats are up to a second old. The launcher gives its ranks a folder of small files, one a rank, which they map:
setting a mark is then a memory write, and whoever reports a rank that is gone reads what it wrote last. Two slots are
written by turns and a byte says which one holds, so that a rank killed in the middle of a write leaves the mark before.

The folder is best in memory (/dev/shm): the writer of a page that belongs to a file on a disk can be held up while the
kernel writes that page back. A write takes about a microsecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from functools import cache
from pathlib import Path

MARKS = "EVENLOAD_MARKS"
"""Names the launcher's folder; unset under torchrun, where marks are as old as the last heartbeat."""
MEETING = "meeting the other ranks"
"""Where a rank is from its first lines until its watchdog beats; nobody but the launcher can tell of its end there."""
CONNECTING = "connecting to the other ranks"
"""Where it beats, and waits for ranks that it cannot tell from dead ones before they beat as well."""

_SLOT = 256
"""Bytes: the length of the mark, then the mark in UTF-8."""


class MarkFile:
    """The marks of this process. Raises OSError where the folder cannot take them."""

    def __init__(self, folder: Path, rank: int) -> None:
        with _path(folder, rank).open("w+b") as file:
            file.truncate(1 + 2 * _SLOT)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._turn = 0

    def write(self, where: str) -> None:
        """`where`, cut to what a slot takes."""
        text = where.encode(errors="replace")[: _SLOT - 1]
        self._turn ^= 1
        start = 1 + self._turn * _SLOT
        self._memory[start : start + 1 + len(text)] = bytes((len(text),)) + text
        self._memory[0] = self._turn


def read(folder: Path | str, rank: int) -> str | None:
    """The last mark of a rank of this machine; None if it never set one."""
    try:
        data = _path(Path(folder), rank).read_bytes()
        start = 1 + data[0] * _SLOT
        text = data[start + 1 : start + 1 + data[start]].decode(errors="replace")
    except (OSError, IndexError):
        return None
    return text or None


def own() -> MarkFile | None:
    """The file of this process, if a launcher gave it one."""
    folder, rank = os.environ.get(MARKS), os.environ.get("RANK")
    return _opened(folder, int(rank), os.getpid()) if folder and rank and rank.isdigit() else None


def of_rank(rank: int) -> str | None:
    """The last mark of any rank, seen from another one; None where there is no launcher's folder."""
    folder = os.environ.get(MARKS)
    return read(folder, rank) if folder else None


@cache
def _opened(folder: str, rank: int, pid: int) -> MarkFile | None:
    """One file a process, also after a fork."""
    with contextlib.suppress(OSError):  # a full disk is no reason not to train
        return MarkFile(Path(folder), rank)
    return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"mark.{rank}"
