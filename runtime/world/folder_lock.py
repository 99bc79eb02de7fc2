"""One run at a time writes into a folder, or into a file.

Rank 0 holds a record lock on ``.lock`` in the folder, or on ``.FILE.lock`` next to the file, by whose text a second run
says who has it. The kernel frees the lock however the process ends, and no child inherits it, so a run that was killed
never blocks the next one. It holds between machines where the file system passes locks on (NFS 4, Lustre with
``flock``, GPFS); where there are none, a warning.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from ...core.errors import EvenloadError, shown
from ..files import LOCK
from .agreement import from_first

logger = logging.getLogger("evenload")

WAIT_S = 5.0
"""So long a run that was killed just now may take to be gone."""
_TRY_AGAIN_S = 0.1
_MOST_CHARACTERS = 300
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
"""A link might lead to a file of others."""


@contextmanager
def folder_lock(*folders: Path | None) -> Iterator[None]:
    """Hold these folders. Collective. Raises EvenloadError, on every rank, where another run holds one."""
    with _held({folder: folder / LOCK for folder in folders if folder}):
        yield


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """As `folder_lock`, for a file, or a folder that appears whole, by a file next to it that is removed at the end."""
    lock = path.absolute().with_name(f".{path.name}.lock")
    with _held({path: lock}) as held:
        try:
            yield
        finally:
            if held:
                lock.unlink(missing_ok=True)  # whoever waits for it sees that it is gone


@contextmanager
def _held(locks: Mapping[Path, Path]) -> Iterator[list[TextIO]]:
    held: list[TextIO] = []
    try:
        from_first(lambda: held.extend(filter(None, itertools.starmap(_locked, locks.items()))), "job")
        yield held
    finally:
        for file in held:
            file.close()


def _locked(of: Path, lock: Path) -> TextIO | None:
    """The file that is locked for `of`; None where no file can be."""
    last_try = time.monotonic() + WAIT_S
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(lock, _FLAGS, 0o666), "a+", errors="replace")
        while not _is_ours(file):
            if time.monotonic() > last_try:
                file.seek(0)
                holder = file.read(_MOST_CHARACTERS).strip() or "a process that has not said its name"
                do = "wait until it ends, end it, or name another one for this run"
                raise EvenloadError(f"another run writes into {of}", holder, do)
            time.sleep(_TRY_AGAIN_S)
        if not _is_at(file, lock):
            file.close()  # whoever had it has just removed it
            return _locked(of, lock)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): a second run on it would not be noticed", of, error.strerror or error)
        return None
    file.seek(0)
    text = file.read(_MOST_CHARACTERS)
    if text and not text.startswith("process "):
        raise EvenloadError(f"{lock} is a file of something else", shown(text), "move it, or name another place")
    with suppress(OSError):  # of a full disk: the lock holds without its text
        file.truncate(0)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
    return file


def _is_ours(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
