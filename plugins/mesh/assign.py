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

from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints, Ranks
from .cost_table import SequenceCosts

THETAS = (1.0, 0.85, 0.7, 0.5, 0.35)
_CLOSE = 1.004
"""Time over its target at which no other share is tried."""


class Assignment(NamedTuple):
    """Which ranks have each sequence, and what every rank takes."""

    cp_groups: list[Ranks]
    """Of each sequence."""
    columns: Ints
    """[K]: the degree of each as a column of `SequenceCosts`."""
    forward: Floats
    """[N] seconds of each rank, launches left out."""
    backward: Floats
    tokens: Ints
    """[N]."""
    turn: list[int]
    """Of each sequence: when it was placed, 0, 1, ..."""

    @property
    def seconds(self) -> float:
        """Seconds of the slowest forward and the slowest backward together."""
        return float(self.forward.max() + self.backward.max())


class Frame(NamedTuple):
    """The ranks that sequences are placed on."""

    num_ranks: int
    node: int
    cap: float
    """Tokens that a rank may hold."""
    queued: bool = False
    """A sequence on several ranks starts when all of them have done what was placed before."""


def columns_for(shares: SequenceCosts, numbers: Ints, target_s: float) -> tuple[Ints, Floats]:
    """The degree (as a column) of least rank-seconds within a target, or the fastest; and its rank-seconds."""
    seconds, area = shares.seconds[numbers], shares.area[numbers]
    within = np.where(seconds <= target_s, area, np.inf)
    columns = np.where(np.isfinite(within).any(axis=1), within.argmin(axis=1), seconds.argmin(axis=1))
    return columns, area[np.arange(len(columns)), columns]


def target_of(shares: SequenceCosts, numbers: Ints, num_ranks: int, theta: float) -> float:
    """Seconds C in which all ranks together can do what sequences of at most ``theta * C`` seconds take."""
    alone = shares.alone[numbers]
    # Nothing makes the longest faster.
    low = max(float(shares.least_area[numbers].sum()) / num_ranks, float(shares.fastest[numbers].max()))
    # Only these change their degree with the target.
    changes = alone > theta * low
    flexible, fixed = numbers[changes], float(alone[~changes].sum()) / num_ranks

    def needed(target: float) -> float:
        return fixed + float(columns_for(shares, flexible, theta * target)[1].sum()) / num_ranks

    if needed(low) <= low:
        return low
    high = 2 * low
    while needed(high) > high:
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= middle else (middle, high)
    return high


def placed(shares: SequenceCosts, numbers: Ints, frame: Frame) -> Assignment | None:
    """The best placement over some shares of the target; None where sequences found no room. ``numbers`` int64 [k]."""
    best: Assignment | None = None
    for theta in THETAS:
        target = target_of(shares, numbers, frame.num_ranks, theta)
        if best is not None and best.seconds <= target * _CLOSE:
            break
        columns = np.zeros(len(numbers), dtype=np.int64)
        split = np.flatnonzero(shares.alone[numbers] > theta * target)
        columns[split], _ = columns_for(shares, numbers[split], theta * target)
        assignment = on_ranks(shares, numbers, columns, frame)
        if assignment is not None and (best is None or assignment.seconds < best.seconds):
            best = assignment
    return best


def on_ranks(shares: SequenceCosts, numbers: Ints, columns: Ints, frame: Frame) -> Assignment | None:
    """Ranks for sequences of given degrees; a larger one for those that find no rank with room."""
    degrees = shares.degrees[columns]
    forward, backward = shares.forward[numbers, columns], shares.backward[numbers, columns]
    tokens = shares.tokens[numbers, columns]
    if not np.isfinite(forward).all():
        return None
    board = _RankLoads(frame, float(forward @ degrees), float(backward @ degrees), len(columns))
    seconds = forward + backward
    shared = np.flatnonzero(degrees > 1)
    for k in shared[np.lexsort((-seconds[shared], degrees[shared] <= frame.node))].tolist():
        if not board.share(k, int(degrees[k]), float(forward[k]), float(backward[k]), int(tokens[k])):
            return None
    columns = columns.copy()
    alone = np.flatnonzero(degrees == 1)
    left = alone[np.argsort(-seconds[alone], kind="stable")]
    while len(left):
        done = board.fill(left.tolist(), forward[left].tolist(), backward[left].tolist(), tokens[left].tolist())
        if done < len(left):
            k = int(left[done])
            column = board.split(k, int(numbers[k]), shares)
            if not column:
                return None
            columns[k] = column
        left = left[done + 1 :]
    return Assignment(board.cp_groups, columns, board.forward, board.backward, board.tokens, board.turn)


class _RankLoads:
    def __init__(self, frame: Frame, forward_s: float, backward_s: float, count: int) -> None:
        n = frame.num_ranks
        self._frame = frame
        self._even = (forward_s / n or 1.0, backward_s / n or 1.0)
        self.forward, self.backward = np.zeros(n), np.zeros(n)
        self.tokens = np.zeros(n, dtype=np.int64)
        self.cp_groups: list[Ranks] = [()] * count
        self.turn = [0] * count
        self._turns = 0

    def _fills(self) -> Floats:
        """How full ranks are [N]: of seconds in either direction, or of tokens; 1.0 is what is even, or the cap."""
        seconds = np.maximum(self.forward / self._even[0], self.backward / self._even[1])
        return np.maximum(seconds, self.tokens / self._frame.cap)

    def share(self, k: int, degree: int, forward: float, backward: float, tokens: int) -> bool:
        """Put a sequence on so many ranks, all after the last of them where the frame says so; False if none are."""
        ranks = self._choose(degree, tokens)
        if ranks is None:
            return False
        if self._frame.queued:
            latest = ranks[int((self.forward[ranks] + self.backward[ranks]).argmax())]
            self.forward[ranks], self.backward[ranks] = self.forward[latest], self.backward[latest]
        self.forward[ranks] += forward
        self.backward[ranks] += backward
        self.tokens[ranks] += tokens
        self.cp_groups[k], self.turn[k] = tuple(ranks.tolist()), self._turns
        self._turns += 1
        return True

    def split(self, k: int, row: int, shares: SequenceCosts) -> int:
        """Put a sequence on as few ranks as have room for it; the column of their number, 0 where none are."""
        for column in range(1, len(shares.degrees)):
            each = float(shares.forward[row, column]), float(shares.backward[row, column])
            tokens = int(shares.tokens[row, column])
            if np.isfinite(each[0]) and self.share(k, int(shares.degrees[column]), *each, tokens):
                return column
        return 0

    def _choose(self, degree: int, tokens: int) -> Ints | None:
        """The least loaded ranks of one node, or of the least loaded nodes, ascending by node."""
        num_ranks, node = self._frame.num_ranks, self._frame.node
        nodes = -(-num_ranks // node)
        row = np.full(nodes * node, np.inf)
        row[:num_ranks] = np.where(self.tokens + tokens > self._frame.cap, np.inf, self._fills())
        grid = row.reshape(nodes, node)
        order = np.argsort(grid, axis=1, kind="stable")
        fill = np.take_along_axis(grid, order, axis=1)
        chosen: list[Ints] = []
        for first in range(0, degree, node):
            take = min(node, degree - first)
            best = int(fill[:, take - 1].argmin())
            if not np.isfinite(fill[best, take - 1]):
                return None
            chosen.append(best * node + np.sort(order[best, :take]))
            fill[best] = np.inf
        return np.concatenate(sorted(chosen, key=lambda ranks: int(ranks[0])))

    def fill(self, numbers: list[int], forward: list[float], backward: list[float], tokens: list[int]) -> int:
        """Put sequences in order on the least loaded ranks with room; how many, up to the first that finds none."""
        even_f, even_b = self._even
        cap, cp_groups = self._frame.cap, self.cp_groups
        f, b, held = self.forward.tolist(), self.backward.tolist(), self.tokens.tolist()
        heap = list(zip(self._fills().tolist(), range(len(f)), strict=True))
        heapify(heap)
        full: list[tuple[float, int, float]] = []  # by room, until sequences are short enough
        done = 0
        for k, df, db, n in zip(numbers, forward, backward, tokens, strict=True):
            while full and -full[0][0] >= n:
                _, rank, fill = heappop(full)
                heappush(heap, (fill, rank))
            while heap and held[heap[0][1]] + n > cap:
                fill, rank = heappop(heap)
                heappush(full, (held[rank] - cap, rank, fill))
            if not heap:
                break
            rank = heap[0][1]
            cp_groups[k] = (rank,)
            f[rank] += df
            b[rank] += db
            held[rank] += n
            heapreplace(heap, (max(f[rank] / even_f, b[rank] / even_b, held[rank] / cap), rank))
            done += 1
        self.forward[:], self.backward[:], self.tokens[:] = f, b, held
        return done
