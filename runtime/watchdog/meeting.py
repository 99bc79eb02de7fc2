"""How the ranks of a job meet: the store, then the process group, watched from the first moment on.

torch waits for all ranks inside one blocking call, silently and for half an hour, and ends in a traceback of its own.
Here a rank first tries the store's port until it opens, and every rank that has reached the store beats on it while the
others come and connect: one that dies meanwhile is named after `gone_s`, one that never comes after `timeout_s`.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ...core.errors import RankError
from ..world.replicas import JobGroup, join
from . import marks
from .attempt import agree_on_attempt, attempt
from .store_client import within
from .store_socket import inherited
from .watchdog import JobRanks, Watchdog

_ASK_S = 30.0
"""A store that is not there for so long is asked after aloud; then again after twice as long, and so on."""
_TRY_S = 0.1
_ANSWER_S = 5.0


def meet(
    backend: str,
    rank: int,
    size: int,
    address: str,
    port: int,
    timeout_s: float,
    gone_s: float,
    replicas: Sequence[int] = (),
) -> None:
    """Make the default process group. Collective.

    Args:
        replicas: ranks of each replica, whose default group is its own; none, or one: the job is one world.
        timeout_s: after which a rank that does not come is given up, and a collective that a peer does not join fails.
        gone_s: after which one that has come and does not beat any more is gone.

    Raises:
        RankError: the store cannot be reached or opened. Once it is there, a failure of any rank ends all of them with
            one message (`Watchdog`).
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if file := marks.own():
        file.write(marks.MEETING)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds_store = rank == 0 and not by_agent
    if not holds_store:
        _await_port(address, port, rank, timeout_s)
    # The first call to a frozen server blocks as any other.
    store = within(gone_s, lambda: _connect(address, port, size, holds_store, timeout))
    if not isinstance(store, TCPStore):
        place = f"{address}:{port}"
        if holds_store:
            what = f"rank 0 cannot open the store of the job at {place}"
        else:
            what = f"rank {rank} cannot reach the store of the job, which {_holder(by_agent, size)} holds at {place}"
        silent = f"somebody listens there, and does not answer in {gone_s:g} s"
        raise RankError(
            what,
            str(store).strip().splitlines()[0] if store else silent,
            "see that MASTER_ADDR is the host of rank 0, that MASTER_PORT is free there and that rank 0 is not stopped",
        )
    if by_agent:
        agree_on_attempt(store, rank, size, timeout_s, gone_s)
    shared = PrefixStore(f"default_pg/{attempt()}", store)
    with Watchdog(gone_s=gone_s, stuck_s=timeout_s, members=JobRanks(shared, rank, size)) as watchdog:
        watchdog.at(marks.CONNECTING)
        if len(replicas) > 1:
            group = JobGroup(shared, rank, replicas, timeout)
            number, rank, size = group.place
            join(group)
            shared = PrefixStore(f"replica/{number}", shared)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size, timeout=timeout)


def _connect(
    address: str, port: int, size: int, holds_store: bool, timeout: datetime.timedelta
) -> TCPStore | RuntimeError:
    """The store, which rank 0 opens here where no agent has, or what torch says instead."""
    use_libuv = os.environ.get("USE_LIBUV", "1") == "1"
    try:
        return TCPStore(
            address,
            port,
            size,
            is_master=holds_store,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=inherited(use_libuv) if holds_store else None,
            use_libuv=use_libuv,
        )
    except RuntimeError as error:
        return error


def _holder(by_agent: bool, size: int) -> str:
    if by_agent:
        return "the torchrun agent"
    where = marks.of_rank(0)
    return f"rank 0 of {size} (it is in '{where}')" if where else f"rank 0 of {size}"


def _await_port(address: str, port: int, rank: int, timeout_s: float) -> None:
    start_s, ask_s = time.monotonic(), _ASK_S
    while True:
        try:
            socket.create_connection((address, port), timeout=_ANSWER_S).close()
            return
        except OSError as error:
            waited_s = time.monotonic() - start_s
            if waited_s >= timeout_s:
                raise RankError(
                    f"rank {rank} waited {timeout_s:g} s for rank 0, which holds the store of the job",
                    f"{address}:{port}: {error}",
                    "look at the end of rank 0's output, and whether MASTER_ADDR and MASTER_PORT name its host and a "
                    "port that this one can reach",
                ) from error
            if waited_s >= ask_s:
                ask_s *= 2
                waits = f"rank {rank} has waited {waited_s:.0f} s and gives up after {timeout_s:g} s"
                print(f"evenload: no store at {address}:{port} yet ({error}); {waits}", file=sys.stderr, flush=True)
        time.sleep(min(_TRY_S, timeout_s))
