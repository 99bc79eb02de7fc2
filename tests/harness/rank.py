"""One rank of a test world (see world.py): joins, then runs the cases that it is sent, one after the other.

A case is JSON: [file, function, arguments, places of groups that some rank still has open]. The answer is a pickled
`Answer`. The end of the connection ends the process, at once: nothing of an interpreter that is torn down is of use to
a test.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib.util
import json
import os
import pickle
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

from . import counts, leaks


class Answer(NamedTuple):
    """Of one rank to one case."""

    ok: bool
    value: Any
    """What the function returned, or the traceback of what it raised."""
    costs: dict[str, float]
    open_places: list[int]
    """Of process groups; see `GroupPool`."""
    left: list[str]
    """What the case has not left as it found it, in words."""


def load(file: str) -> ModuleType:
    """Import a test module by its path, as pytest's importlib mode does: there is no package to find it in."""
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]


def run(file: str, function: str, arguments: list[Any]) -> tuple[bool, Any]:
    leaks.seed_generators()
    try:
        return True, getattr(load(file), function)(*arguments)
    except BaseException:
        return False, traceback.format_exc()


def serve(folder: str, door: str, rank: int, size: int) -> None:
    """Join the world whose store is in a folder, and answer the cases of the socket `door` until it is closed."""
    import torch
    import torch.distributed as dist

    from .groups import GroupPool

    faulthandler.enable()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(door)
        connection = Connection(client.detach())
    if "rehearsal" in sys.modules:
        os.environ["REHEARSAL_OUT"] = folder  # where its ranks compare what they ask for
    connection.send(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=150),
    )
    pool, found = GroupPool(), leaks.Found()
    while True:
        try:
            *case, open_places = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        pool.settle(open_places)
        ok, value = run(*case)
        pool.keep(*(sys.modules[name] for name in KEEPERS if name in sys.modules))
        left = found.left() + [f"a process group is open: {group}" for group in pool.left_open()]
        answer = Answer(ok, value, counts.since_last_report(), pool.open_places(), left)
        connection.send_bytes(pickle.dumps(tuple(answer)))  # `send` would share tensors, not copy them


KEEPERS = ("deepspeed.utils.groups", "deepspeed.comm.comm", "evenload.runtime.world.agreement")
"""Modules that keep groups for as long as a process lives."""
