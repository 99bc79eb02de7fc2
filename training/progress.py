"""How far work is while it goes on: told to whoever asks for the work, from rank 0 by a socket that nobody waits for.

What nobody reads of it is lost.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress

Progress = Callable[[str, int, int | None, str], object]
"""Takes a task's name, its steps done, how many there are (None: nobody knows), and how the last one was, in words."""


PROGRESS_SOCKET = "EVENLOAD_PROGRESS_SOCKET"
"""Names the file descriptor, in rank 0's environment."""
_MOST_BYTES = 1 << 20
"""More than a socket takes at once."""


def silent(task: str, done: int, total: int | None, text: str) -> None:
    """A `Progress` that shows nothing to anybody."""


def progress_sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def inherited_progress() -> Progress | None:
    """Tells the launcher, once; None where this process was given no socket."""
    text = os.environ.pop(PROGRESS_SOCKET, None)
    if text is None:
        return None
    end = socket.socket(fileno=int(text))

    def tell(*words: object) -> None:
        with suppress(OSError):
            end.send(json.dumps(words).encode(), socket.MSG_DONTWAIT)

    return tell


def pass_on_progress(end: socket.socket, progress: Progress) -> None:
    """Tell all that rank 0 has sent since the last time."""
    with suppress(OSError):
        while packet := end.recv(_MOST_BYTES, socket.MSG_DONTWAIT):
            progress(*json.loads(packet))
