"""A board on every node, which its ranks alone read and write: a store that the first of them holds.

What goes from rank to rank of a node stays there, whatever the size of the job.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...core.input.bounds import RANKS
from ...core.planning.turns import PlannerRotation
from .agreement import everyone, rank_and_size
from .variables import integer

_HERE = "127.0.0.1"
_TIMEOUT = timedelta(seconds=30)
_LONGEST_SLEEP_S = 0.005


class NodeBoard:
    """Bytes by key, on this node."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken too

    def take(self, key: str, timeout_s: float | None) -> bytes | None:
        """What is there, awaited so long (None: for ever); None where nothing is."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        sleep_s = 0.0002
        while not self._store.check([key]):
            if until_s is not None and time.monotonic() >= until_s:
                return None
            time.sleep(sleep_s)
            sleep_s = min(_LONGEST_SLEEP_S, 2 * sleep_s)
        return bytes(self._store.get(key))

    def drop(self, key: str) -> None:
        self._store.delete_key(key)


def open_board() -> PlannerRotation | None:
    """The turns of this rank on its node, as torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE describe it; None, on all ranks
    alike, where any rank is alone on its node or does not reach its board. Collective."""
    rank, _ = rank_and_size()
    place, size = integer("LOCAL_RANK", 0, 0, RANKS - 1), integer("LOCAL_WORLD_SIZE", 1, 1, RANKS)
    nodes = everyone((rank - place, size))
    if not all(
        count > 1 and first >= 0 and nodes[first : first + count] == [(first, count)] * count for first, count in nodes
    ):
        return None
    board = _opened(0) if place == 0 else None
    ports = everyone(board.port if board else 0)
    if place and (port := ports[rank - place]):
        board = _opened(port)
    if not all(everyone(board is not None)) or board is None:
        return None
    return PlannerRotation(NodeBoard(board), place, size)


def _opened(port: int) -> TCPStore | None:
    """The store of this node at a port; 0: a new one, which this process holds."""
    try:
        return TCPStore(_HERE, port, None, is_master=port == 0, timeout=_TIMEOUT, wait_for_workers=False)
    except RuntimeError:
        return None
