"""The first failure of a job: what is posted about it, and which errors are only its echo."""

from __future__ import annotations

import json
import traceback
from typing import Literal, NamedTuple

import torch.distributed as dist

from ...core.errors import EvenloadError, RankError

_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "failed to pass monitoredBarrier",
    "NCCL communicator was aborted",
)
_MAX_TEXT = 20_000


class Failure(NamedTuple):
    """There is one per job: the first that was posted."""

    kind: Literal["raised", "gone", "stuck"]
    rank: int
    """The culprit."""
    printer: int
    """The one rank that prints `message`."""
    message: str
    code: int = 1
    """Exit code of every process."""

    def encode(self) -> str:
        return json.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        return cls(*json.loads(data))


def raised(error: BaseException, rank: int, size: int, host: str, where: str) -> Failure:
    """The failure of a rank by its own error; with the traceback unless the error is one of ours, made to be read."""
    if isinstance(error, RankError):
        return Failure("raised", rank, rank, f"evenload: in '{where}': {error}")
    text = "".join(traceback.format_exception_only(error)).strip()
    before = "" if isinstance(error, EvenloadError) else "".join(traceback.format_exception(error))[-_MAX_TEXT:] + "\n"
    if isinstance(error, EvenloadError):
        text = str(error)
    message = f"{before}evenload: rank {rank} of {size} ({host}) failed in '{where}': {text[:_MAX_TEXT]}"
    return Failure("raised", rank, rank, message, code=2 if isinstance(error, EvenloadError) else 1)


def gone(rank: int, size: int, printer: int, host: str, last_seen: str) -> Failure:
    """The failure of a rank whose heart stopped; `last_seen` says where it was and how exactly that is known."""
    return Failure(
        "gone",
        rank,
        printer,
        f"evenload: rank {rank} of {size} ({host}) is gone; {last_seen}\n"
        "  found: no heartbeat; it was killed or stopped, crashed, or holds the interpreter lock\n"
        "  do: look for the out-of-memory killer in that host's kernel log, and at the end of that rank's output",
    )


def absent(rank: int, size: int, printer: int, waited_s: float) -> Failure:
    """The failure of a rank that never beat."""
    return Failure(
        "gone",
        rank,
        printer,
        f"evenload: rank {rank} of {size} did not come\n"
        f"  found: no heartbeat of it in {waited_s:g} s\n"
        "  do: look at the end of that rank's output, and whether all hosts got the same MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE",
    )


def stuck(rank: int, size: int, host: str, where: str, why: str) -> Failure:
    """The failure of a rank that the others wait for; it prints where it stands itself."""
    return Failure(
        "stuck",
        rank,
        rank,
        f"evenload: rank {rank} of {size} ({host}) is stuck in '{where}'\n"
        f"  found: {why}\n"
        "  do: see above where it stands; if the work is just long, raise the limit `stuck_s`",
    )


def left(rank: int, size: int, printer: int, host: str) -> Failure:
    """The failure of a rank that ended its work while others are in the midst of theirs."""
    message = f"evenload: rank {rank} of {size} ({host}) ended early while others still work"
    return Failure("gone", rank, printer, message)


def store_lost(rank: int, printer: int, holder: str, last_seen: str, why: str) -> Failure:
    """The failure of whoever holds the store; `rank` is -1 where that is no rank but the torchrun agent."""
    where = f"; {last_seen}" if last_seen else ""
    return Failure(
        "gone",
        rank,
        printer,
        f"evenload: {holder} is gone, and with it the store of the job{where}\n"
        f"  found: {why}\n"
        "  do: look whether it was killed or stopped, for the out-of-memory killer in that host's kernel log, and at "
        "the end of its output",
    )


def suspended(rank: int, size: int, host: str, where: str, seconds: float) -> Failure:
    """The failure of a rank that was stopped itself, and finds that the others have ended meanwhile."""
    return Failure(
        "gone",
        rank,
        rank,
        f"evenload: rank {rank} of {size} ({host}) was held up for {seconds:.0f} s, and the others ended meanwhile\n"
        "  found: its threads did not run: it was stopped, swapped out, or held the interpreter lock; "
        f"it is in '{where}' now\n"
        "  do: start the job again; the others' output says what they met",
    )


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that some peer went away or did not come.

    Sockets of the user's own raise OSError, collectives RuntimeError; so a data server that hangs up is no echo.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _ECHOES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
