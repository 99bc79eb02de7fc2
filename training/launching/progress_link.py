"""Progress on its way from rank 0 to the launcher, by a socket that nobody waits for: what nobody reads is lost."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress

from ..progress import Progress

PROGRESS_SOCKET = "EVENLOAD_PROGRESS_SOCKET"
"""Names the file descriptor, in rank 0's environment."""
_MOST_BYTES = 1 << 20
"""More than a socket takes at once."""


def connected() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def inherited() -> Progress | None:
    """Tells the launcher, once; None where this process was given no socket."""
    text = os.environ.pop(PROGRESS_SOCKET, None)
    if text is None:
        return None
    end = socket.socket(fileno=int(text))

    def tell(*words: object) -> None:
        with suppress(OSError):
            end.send(json.dumps(words).encode(), socket.MSG_DONTWAIT)

    return tell


def pass_on(end: socket.socket, progress: Progress) -> None:
    """Tell all that rank 0 has sent since the last time."""
    with suppress(OSError):
        while packet := end.recv(_MOST_BYTES, socket.MSG_DONTWAIT):
            progress(*json.loads(packet))
