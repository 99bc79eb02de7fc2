"""The variables by which torchrun tells a process its place in a job, read and checked before anything is joined.

Nonsense in them would end in a wait for ranks that never come, or in an error of torch's own. Needs no torch.
"""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

from ...core.errors import EvenloadError, shown
from ...core.input.bounds import RANKS

RESULT = "EVENLOAD_RESULT"
"""Names the file for rank 0's result; unset under torchrun, where rank 0 prints it."""
MEETING_PLACE, REPLICA, LIFE = "EVENLOAD_MEET", "EVENLOAD_REPLICA", "EVENLOAD_LIFE"
"""Name the store of replicas that come and go, HOST:PORT, which of them this rank is of, and how often that was
started: what --elastic, --meet and --replica set."""
_DO = "start the ranks with torchrun, or unset RANK and WORLD_SIZE to run alone"
_NAMED_S = 3.0
"""The name of a machine that has just started may take a moment to be known."""


class JobVariables(NamedTuple):
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    rank: int
    size: int
    address: str
    port: int


def job_variables() -> JobVariables | None:
    """What the environment says of this process; None where it is of no job. Raises EvenloadError: some are missing, no
    integers, out of range, or name a machine that is not known."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise EvenloadError("the environment describes only part of a job", f"missing: {', '.join(missing)}", _DO)
    size = integer("WORLD_SIZE", 1, 1, RANKS)
    rank = integer("RANK", 0, 0, size - 1)
    port = integer("MASTER_PORT", 0, 0 if size == 1 else 1, 65535)  # 0: any port, which no peer could know
    integer("LOCAL_RANK", 0, 0, RANKS - 1)
    integer("LOCAL_WORLD_SIZE", 1, 1, RANKS)
    address = os.environ["MASTER_ADDR"]
    _refuse_unknown(address, port)
    return JobVariables(rank, size, address, port)


def integer(name: str, default: int, least: int, most: int) -> int:
    """The variable as an integer; ``default`` where it is not set. Raises EvenloadError."""
    text = os.environ.get(name, str(default))
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) <= 20 and least <= int(digits) <= most:
        return int(digits)
    raise EvenloadError(f"{name} is not an integer from {least} to {most}", shown(text), _DO)


def _refuse_unknown(address: str, port: int) -> None:
    until = time.monotonic() + _NAMED_S
    while True:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except UnicodeError as error:
            raise EvenloadError("MASTER_ADDR is not the name of a machine", shown(address), _DO) from error
        except OSError as error:
            if time.monotonic() > until:
                detail = f"{shown(address)}: {error.strerror}"
                raise EvenloadError("MASTER_ADDR names no machine that is known here", detail, _DO) from error
        time.sleep(0.5)
