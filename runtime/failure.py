"""The first failure of a job: what is posted about it, and which errors are only its echo."""

from __future__ import annotations

import json
import traceback
from typing import Literal, NamedTuple

import torch.distributed as dist

from ..core.errors import EvenloadError, RankError

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
