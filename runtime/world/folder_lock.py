"""One run at a time writes into a folder.

Rank 0 holds a record lock on ``.lock`` in it, by whose text a second run says who has it. The kernel frees the lock
however the process ends, and no child inherits it, so a run that was killed never blocks the next one. It holds between
machines where the file system passes locks on (NFS 4, Lustre with ``flock``, GPFS); where there are none, a warning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from ...core.errors import EvenloadError
from .agreement import from_first

logger = logging.getLogger("evenload")

NAME = ".lock"
WAIT_S = 5.0
"""So long a run that was killed just now may take to be gone."""
_TRY_AGAIN_S = 0.1
_MOST_CHARACTERS = 300


@contextmanager
def folder_lock(*folders: Path | None) -> Iterator[None]:
    """Hold these folders. Collective. Raises EvenloadError, on every rank, where another run holds one."""
    held: list[TextIO] = []
    try:
        from_first(lambda: held.extend(filter(None, map(_locked, filter(None, folders)))))
        yield
    finally:
        for file in held:
            file.close()


def _locked(folder: Path) -> TextIO | None:
    """The file that is locked; None where no file can be."""
    last_try = time.monotonic() + WAIT_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a+")
        while not _is_ours(file):
            if time.monotonic() > last_try:
                file.seek(0)
                holder = file.read(_MOST_CHARACTERS).strip() or "a process that has not said its name"
                do = "wait until it ends, end it, or name another folder for this one"
                raise EvenloadError(f"another run writes into {folder}", holder, do)
            time.sleep(_TRY_AGAIN_S)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): a second run on it would not be noticed", folder, error.strerror)
        return None
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
