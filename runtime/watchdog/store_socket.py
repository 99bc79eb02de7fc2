"""The port of the job's store, held from the start.

A port that was free when the launcher looked may have been taken by another program by the time rank 0 has imported its
trainer and opens the store. So the launcher binds it and hands the socket on. It does not listen yet: ranks that come
earlier are refused and try again, as if it were not there.
"""

from __future__ import annotations

import os
import socket

STORE_SOCKET = "EVENLOAD_STORE_SOCKET"
"""Names the file descriptor, in rank 0's environment."""


def bound() -> socket.socket:
    """A socket with a free local port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def inherited(use_libuv: bool) -> int | None:
    """The descriptor that this process was given, once; None where it was given none, or the store cannot take it."""
    text = os.environ.pop(STORE_SOCKET, None)
    if text is None:
        return None
    if not use_libuv:
        os.close(int(text))
        return None
    return int(text)
