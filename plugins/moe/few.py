"""Few copies: within the slots and the tolerance of a policy, as few copies as a greedy rule needs.

A rank is freed of what it has over its share by one copy, if the taker that this fills best leaves over no more than
half of what all takers have to spare. Where no rank is freed so, the taker that lacks most takes from the most loaded
rank of those whose hottest expert fills it whole, or takes the hottest expert there is. A giver may so fall below its
share, and takes from another. One slot a rank was enough for exact loads in all drawn loads of 64 ranks x 128 experts
and 256 x 256, and the first rule saves 6 to 10 % of the copies at a tolerance of 1 %
(benchmarks/results/experts.md). Ranks take from their node first. Cost: O((R slots + E) log R), in Python numbers.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

import numpy as np

from ...core.aliases import Ints
from ...core.experts.quotas import ranks_of_experts
from ...core.plan.expert_policy import ExpertPolicy


def few_copies(loads_E: Ints, policy: ExpertPolicy, num_ranks: int, most: int) -> Ints:
    """Quotas [E, R] with few copies, of which no rank has more than ``most`` tokens where slots and experts allow."""
    draft = _Draft(loads_E, num_ranks, policy.slots, most)
    size = policy.node_ranks or num_ranks
    for first in range(0, num_ranks, size) if size < num_ranks else ():
        draft.fill(range(first, first + size))
    draft.fill(range(num_ranks))
    quotas_ER = np.zeros((len(loads_E), num_ranks), dtype=np.int64)
    homes_E = ranks_of_experts(*quotas_ER.shape)
    quotas_ER[np.arange(len(loads_E)), homes_E] = loads_E
    experts, tokens = np.array(draft.experts, dtype=np.int64), np.array(draft.tokens, dtype=np.int64)
    np.subtract.at(quotas_ER, (experts, homes_E[experts]), tokens)
    quotas_ER[experts, draft.takers] += tokens
    return quotas_ER


class _Draft:
    """Copies so far, and what they have left: tokens over the share by rank, free slots, experts by tokens left."""

    def __init__(self, loads_E: Ints, num_ranks: int, slots: int, most: int) -> None:
        loads_RM = loads_E.reshape(num_ranks, -1)
        self.experts: list[int] = []
        self.takers: list[int] = []
        self.tokens: list[int] = []
        """Of each copy: its expert, the rank that takes of it, and how much."""
        self._loads: list[list[int]] = loads_RM.tolist()
        self._own = loads_RM.shape[1]
        self._over: list[int] = (loads_RM.sum(axis=1) - most).tolist()
        self._hottest: list[int] = loads_RM.max(axis=1).tolist()
        """Tokens that each rank has left of the expert of which it has most."""
        self._free = [slots] * num_ranks
        self._left: list[list[int]] = [[] for _ in range(num_ranks)]
        """Of givers the experts, by tokens left."""

    def fill(self, ranks: range) -> None:
        """Let these ranks take from each other until nobody has too much, or nobody can take more.

        Rows and heaps are of numbers: what they are ordered by, times the number of ranks, and the rank. Entries of
        heaps whose giver has changed since are skipped.
        """
        over, free, hottest, base = self._over, self._free, self._hottest, len(self._over)
        lacks = sorted(base - 1 - rank - over[rank] * base for rank in ranks if over[rank] < 0 < free[rank])
        givers = [rank for rank in ranks if over[rank] > 0]
        waiting = [rank - hottest[rank] * base for rank in givers]
        ready: list[int] = []
        """Givers whose hottest expert may fill what the next taker lacks, most loaded first."""
        heapify(waiting)
        spare = (sum(code // base for code in lacks) - sum(over[rank] for rank in givers)) // 2
        fits: list[tuple[int, int, int, int]] = []
        """(what is left over, giver, its tokens over the share, taker's code), where one copy frees the giver."""
        for giver in givers if spare > 0 else ():
            self._note_fit(giver, lacks, fits)
        while lacks:
            giver, place = self._next_fit(lacks, fits, spare) if fits else (-1, -1)
            if giver < 0:
                giver, place = self._next_giver(lacks[-1] // base, ready, waiting), len(lacks) - 1
                if giver < 0:
                    return
            code = lacks.pop(place)
            lack, taker = code // base, base - 1 - code % base
            moved = lack if lack < hottest[giver] else hottest[giver]
            if not free[giver] and over[giver] < moved:
                moved = over[giver]
            hottest[giver] = self._copied(giver, taker, moved)
            over[giver] -= moved
            over[taker] += moved
            free[taker] -= 1
            if over[giver] > 0:
                heappush(waiting, giver - hottest[giver] * base)
                if spare > 0 and lacks and over[giver] * base <= lacks[-1]:
                    self._note_fit(giver, lacks, fits)
            elif over[giver] < 0 < free[giver]:
                insort(lacks, base - 1 - giver - over[giver] * base)
            if moved < lack and free[taker]:
                insort(lacks, code - moved * base)

    def _note_fit(self, giver: int, lacks: list[int], fits: list[tuple[int, int, int, int]]) -> None:
        """Note the taker that one copy fills best of those that would free the giver, if there is any."""
        over, base = self._over[giver], len(self._over)
        if over <= self._hottest[giver] and (place := bisect_left(lacks, over * base)) < len(lacks):
            heappush(fits, (lacks[place] // base - over, giver, over, lacks[place]))

    def _next_fit(self, lacks: list[int], fits: list[tuple[int, int, int, int]], spare: int) -> tuple[int, int]:
        """A giver and the place of its taker, if next to nothing is left over; (-1, -1) otherwise."""
        while fits and fits[0][0] <= spare:
            _, giver, over, code = heappop(fits)
            if over == self._over[giver]:
                place = bisect_left(lacks, code)
                if place < len(lacks) and lacks[place] == code:
                    return giver, place
                self._note_fit(giver, lacks, fits)
        return -1, -1

    def _next_giver(self, lack: int, ready: list[int], waiting: list[int]) -> int:
        """The most loaded rank whose hottest expert has what a taker lacks, else the one with the hottest; -1: none."""
        over, hottest, base = self._over, self._hottest, len(self._over)
        while waiting:
            giver = waiting[0] % base
            known = (giver - waiting[0]) // base
            if known == hottest[giver] and over[giver] > 0:
                if known < lack:
                    break
                heappush(ready, giver - over[giver] * base)
            heappop(waiting)
        while ready:
            giver = ready[0] % base
            if (giver - ready[0]) // base == over[giver] > 0:
                if hottest[giver] >= lack:
                    return giver
                heappush(waiting, giver - hottest[giver] * base)
            heappop(ready)
        return waiting[0] % base if waiting else -1

    def _copied(self, giver: int, taker: int, tokens: int) -> int:
        """Note a copy of a giver's hottest expert; what it has left of the one that is the hottest then."""
        left, own = self._left[giver], self._own
        if not left:
            left += sorted([amount * own + own - 1 - place for place, amount in enumerate(self._loads[giver])])
        code = left.pop()
        insort(left, code - tokens * own)
        self.experts.append(giver * own + own - 1 - code % own)
        self.takers.append(taker)
        self.tokens.append(tokens)
        return left[-1] // own
