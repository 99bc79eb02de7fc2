"""The first failure of a job: what is posted about it, and which errors are only its echo."""

from __future__ import annotations

import json
import traceback
from typing import Literal, NamedTuple

import torch.distributed as dist

from ...core.errors import EvenloadError, RankError
from ..world.replicas import named

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
    what = f"evenload: rank {named(rank)} of {size} ({host}) failed in '{where}': "
    if isinstance(error, EvenloadError):
        return Failure("raised", rank, rank, what + str(error)[:_MAX_TEXT], code=2)
    text = "".join(traceback.format_exception_only(error)).strip()
    before = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    return Failure("raised", rank, rank, f"{before}\n{what}{text[:_MAX_TEXT]}")


def gone(rank: int, size: int, printer: int, host: str, last_seen: str) -> Failure:
    """The failure of a rank whose heart stopped; `last_seen` says where it was and how exactly that is known."""
    what = f"rank {named(rank)} of {size} ({host}) is gone; {last_seen}"
    detail = "no heartbeat; it was killed or stopped, crashed, or holds the interpreter lock"
    do = "look for the out-of-memory killer in that host's kernel log, and at the end of that rank's output"
    return _failure("gone", rank, printer, what, detail, do)


def absent(rank: int, size: int, printer: int, waited_s: float) -> Failure:
    """The failure of a rank that never beat."""
    do = "look at the end of that rank's output, and whether all hosts got the same MASTER_ADDR, MASTER_PORT and "
    detail = f"no heartbeat of it in {waited_s:g} s"
    return _failure("gone", rank, printer, f"rank {named(rank)} of {size} did not come", detail, f"{do}WORLD_SIZE")


def stuck(rank: int, size: int, host: str, where: str, why: str) -> Failure:
    """The failure of a rank that the others wait for; it prints where it stands itself."""
    do = "see above where it stands; if the work is just long, raise the limit `stuck_s`"
    return _failure("stuck", rank, rank, f"rank {named(rank)} of {size} ({host}) is stuck in '{where}'", why, do)


def left(rank: int, size: int, printer: int, host: str) -> Failure:
    """The failure of a rank that ended its work while others are in the midst of theirs."""
    return _failure("gone", rank, printer, f"rank {named(rank)} of {size} ({host}) ended early while others still work")


def store_lost(rank: int, printer: int, holder: str, last_seen: str, why: str) -> Failure:
    """The failure of whoever holds the store; `rank` is -1 where that is no rank but the torchrun agent."""
    what = f"{holder} is gone, and with it the store of the job" + (f"; {last_seen}" if last_seen else "")
    where = "for the out-of-memory killer in that host's kernel log, and at the end of its output"
    return _failure("gone", rank, printer, what, why, f"look whether it was killed or stopped, {where}")


def suspended(rank: int, size: int, host: str, where: str, seconds: float) -> Failure:
    """The failure of a rank that was stopped itself, and finds that the others have ended meanwhile."""
    what = f"rank {named(rank)} of {size} ({host}) was held up for {seconds:.0f} s, and the others ended meanwhile"
    detail = "its threads did not run: it was stopped, swapped out, or held the interpreter lock"
    do = "start the job again; the others' output says what they met"
    return _failure("gone", rank, rank, what, f"{detail}; it is in '{where}' now", do)


def _failure(kind: Literal["gone", "stuck"], rank: int, printer: int, *parts: str) -> Failure:
    """With the message of a `RankError` of these parts."""
    return Failure(kind, rank, printer, f"evenload: {RankError(*parts)}")


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
