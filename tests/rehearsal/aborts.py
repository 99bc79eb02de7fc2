"""What NCCL does where a peer is gone: it raises nothing. The host stands still where it waits for the device, until
NCCL's watchdog, a thread of C++ that Python does not see, ends the process.

After how long depends on the version of torch: at once, or a minute later, in which it would write down what it knows
(`TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC`). `REHEARSAL_ABORT_S` says so here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from . import ledger

GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
MESSAGE = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 Rank {rank}] "
    "Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network "
    "error\n"
)


@contextmanager
def as_nccl(on_gpu: bool) -> Iterator[None]:
    """Around what gloo does for NCCL."""
    try:
        yield
    except RuntimeError as error:
        if not on_gpu or not any(text in str(error) for text in GONE):
            raise
        handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        if handling == "2":
            raise dist.DistBackendError("NCCL communicator was aborted") from error
        if handling != "0":
            threading.Thread(target=_abort, name="nccl", daemon=True).start()
        while True:
            time.sleep(0.1)


def _abort() -> None:
    time.sleep(float(os.environ.get("REHEARSAL_ABORT_S", "60")))
    os.write(2, MESSAGE.format(rank=os.environ.get("RANK", "0")).encode())
    ledger.write()
    os.abort()
