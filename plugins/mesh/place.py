"""Sequences onto ranks, each on as many as it deserves, so that all ranks finish together.

Objective, for degrees d_k and sets of ranks R_k, |R_k| = d_k (all ranks work at once; what a rank has of sequences adds
up):

    minimise  max_r  sum_{k: r in R_k} seconds[k, d_k]        with  sum_{k: r in R_k} tokens_k / d_k <= cap

1. A sequence gets the degree of least rank-seconds d * seconds[k, d] among those that take at most a share ``theta``
   of the target C and hold at most ``cap`` tokens a rank: degree by time, memory as a cap only. C is where the
   rank-seconds of all of them, spread over all ranks, take C.
2. Sequences of more than a node go to the nodes that are least loaded, then those of several ranks into one node, then
   all others longest first onto the least loaded rank with room, forward and backward levelled at once.
3. Some ``theta`` are tried: smaller parts level better and send more.

O(K D) for the degrees, O(shared N + K log N) for the ranks.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ...core.partition import Floats, Ints
from .prices import Shares

THETAS = (1.0, 0.7, 0.5, 0.35, 0.25)
_CLOSE = 1.004
"""Time over its target at which no other share is tried."""

Ranks = tuple[int, ...]


class Placed(NamedTuple):
    """Sequences on ranks."""

    homes: list[Ranks]
    """Of each sequence."""
    columns: Ints
    """[K]: the degree of each as a column of `Shares`."""
    forward: Floats
    """[N] seconds of each rank, launches left out."""
    backward: Floats
    tokens: Ints
    """[N]."""
    turn: list[int]
    """Of each sequence: when it was placed, 0, 1, ..."""

    @property
    def seconds(self) -> float:
        """Of the slowest forward and the slowest backward."""
        return float(self.forward.max() + self.backward.max())


class Frame(NamedTuple):
    """The ranks that sequences are placed on."""

    num_ranks: int
    node: int
    cap: float
    """Tokens that a rank may hold."""
    longest_share: float
    """Tokens that it may hold of one sequence."""
    queued: bool = False
    """A sequence on several ranks starts when all of them have done what was placed before."""


def columns_for(shares: Shares, target_s: float, cap: float) -> tuple[Ints, Floats]:
    """The degree (as a column) of least rank-seconds within a target, or the fastest; and its rank-seconds."""
    seconds = np.where(shares.tokens <= cap, shares.seconds, np.inf)
    area = seconds * shares.degrees
    within = np.where(seconds <= target_s, area, np.inf)
    columns = np.where(np.isfinite(within).any(axis=1), within.argmin(axis=1), seconds.argmin(axis=1))
    return columns, area[np.arange(len(columns)), columns]


def target_of(shares: Shares, frame: Frame, theta: float) -> float:
    """Seconds C in which all ranks together can do what sequences of at most ``theta * C`` seconds take."""
    seconds = np.where(shares.tokens <= frame.longest_share, shares.seconds, np.inf)
    area = seconds * shares.degrees
    least = float(area.min(axis=1).sum()) / frame.num_ranks
    alone = float(seconds.min(axis=1).max())  # nothing makes the longest faster
    low, high = max(least, alone), np.inf
    # Only these change their degree with the target.
    changes = seconds[:, 0] > theta * low
    flexible, fixed = np.flatnonzero(changes), float(area[~changes, 0].sum()) / frame.num_ranks
    part = shares.rows(flexible)

    def needed(target: float) -> float:
        return fixed + float(columns_for(part, theta * target, frame.longest_share)[1].sum()) / frame.num_ranks

    if needed(low) <= low:
        return low
    high = 2 * low
    while needed(high) > high:
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= middle else (middle, high)
    return high


def placed(shares: Shares, frame: Frame) -> Placed | None:
    """The best placement over some shares of the target; None where sequences found no room."""
    best: Placed | None = None
    for theta in THETAS:
        target = target_of(shares, frame, theta)
        if best is not None and best.seconds <= target * _CLOSE:
            break
        columns, _ = columns_for(shares, theta * target, frame.longest_share)
        found = on_ranks(shares, columns, frame)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def on_ranks(shares: Shares, columns: Ints, frame: Frame) -> Placed | None:
    """Ranks for sequences of given degrees."""
    rows = np.arange(len(columns))
    degrees = shares.degrees[columns]
    forward, backward = shares.forward[rows, columns], shares.backward[rows, columns]
    tokens = shares.tokens[rows, columns]
    if not np.isfinite(forward).all():
        return None
    board = _Board(frame, float(forward @ degrees), float(backward @ degrees))
    homes: list[Ranks] = [()] * len(columns)
    turn = [0] * len(columns)
    seconds = forward + backward
    shared = np.flatnonzero(degrees > 1)
    order = shared[np.lexsort((-seconds[shared], degrees[shared] <= frame.node))]
    for place, k in enumerate(order.tolist()):
        ranks = board.choose(int(degrees[k]), int(tokens[k]))
        if ranks is None:
            return None
        board.put_all(ranks, float(forward[k]), float(backward[k]), int(tokens[k]))
        homes[k], turn[k] = tuple(ranks), place
    columns = columns.copy()
    alone = np.flatnonzero(degrees == 1)
    for k in alone[np.argsort(-seconds[alone], kind="stable")].tolist():
        rank = board.emptiest(int(tokens[k]))
        if rank is not None:
            board.put(rank, float(forward[k]), float(backward[k]), int(tokens[k]))
            homes[k] = (rank,)
            continue
        for column in range(1, len(shares.degrees)):
            ranks = board.choose(int(shares.degrees[column]), int(shares.tokens[k, column]))
            if ranks is not None and np.isfinite(shares.forward[k, column]):
                break
        else:
            return None
        each = float(shares.forward[k, column]), float(shares.backward[k, column]), int(shares.tokens[k, column])
        board.put_all(ranks, *each)
        homes[k], columns[k] = tuple(ranks), column
    return Placed(homes, columns, *board.totals(), turn)


class _Board:
    """What ranks hold while sequences are placed: lists, as most of them are placed one by one."""

    def __init__(self, frame: Frame, forward_s: float, backward_s: float) -> None:
        n = frame.num_ranks
        self._frame = frame
        self._even = (forward_s / n or 1.0, backward_s / n or 1.0)
        self._forward, self._backward, self._fill = [0.0] * n, [0.0] * n, [0.0] * n
        self._room = [frame.cap] * n
        self._heap = [(0.0, rank) for rank in range(n)]

    def totals(self) -> tuple[Floats, Floats, Ints]:
        """Seconds forward and backward, and tokens, of every rank."""
        tokens = (self._frame.cap - np.array(self._room)).astype(np.int64)
        return np.array(self._forward), np.array(self._backward), tokens

    def put(self, rank: int, forward: float, backward: float, tokens: int) -> None:
        self._forward[rank] += forward
        self._backward[rank] += backward
        self._room[rank] -= tokens
        self._fill[rank] = max(
            self._forward[rank] / self._even[0],
            self._backward[rank] / self._even[1],
            1.0 - self._room[rank] / self._frame.cap,
        )
        heappush(self._heap, (self._fill[rank], rank))

    def put_all(self, ranks: list[int], forward: float, backward: float, tokens: int) -> None:
        """On several ranks, which wait for the last of them where the frame says so."""
        if self._frame.queued:
            latest = max(ranks, key=lambda rank: self._forward[rank] + self._backward[rank])
            begin = self._forward[latest], self._backward[latest]
            for rank in ranks:
                self._forward[rank], self._backward[rank] = begin
        for rank in ranks:
            self.put(rank, forward, backward, tokens)

    def emptiest(self, tokens: int) -> int | None:
        """The least loaded rank with room for so many tokens."""
        heap, full, found = self._heap, [], None
        while heap:
            fill, rank = heap[0]
            if fill < self._fill[rank]:  # out of date
                heappop(heap)
            elif self._room[rank] < tokens:
                full.append(heappop(heap))
            else:
                found = rank
                break
        for entry in full:
            heappush(heap, entry)
        return found

    def choose(self, degree: int, tokens: int) -> list[int] | None:
        """Ranks for a shared sequence: the least loaded ones of one node, or of the least loaded nodes."""
        num_ranks, node = self._frame.num_ranks, self._frame.node
        nodes = -(-num_ranks // node)
        row = np.full(nodes * node, np.inf)
        row[:num_ranks] = np.where(np.array(self._room) < tokens, np.inf, self._fill)
        grid = row.reshape(nodes, node)
        order = np.argsort(grid, axis=1, kind="stable")
        fill = np.take_along_axis(grid, order, axis=1)
        if degree <= node:
            best = int(fill[:, degree - 1].argmin())
            if not np.isfinite(fill[best, degree - 1]):
                return None
            return sorted((best * node + order[best, :degree]).tolist())
        chosen: list[int] = []
        left = np.ones(nodes, dtype=bool)
        while len(chosen) < degree:
            take = min(node, degree - len(chosen))
            worst = np.where(left, fill[:, take - 1], np.inf)
            best = int(worst.argmin())
            if not np.isfinite(worst[best]):
                return None
            left[best] = False
            chosen += sorted((best * node + order[best, :take]).tolist())
        return chosen
