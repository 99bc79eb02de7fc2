"""Gangs: each long sequence alone on as many ranks as it deserves, short ones packed on single ranks beside.

ByteScale's balanced hybrid data parallelism (arXiv 2502.21231, section 5): ranks run different numbers of micro-batches
and meet once, at the sum of gradients. There a sequence gets as many ranks as its tokens fill; here as many as bring it
under its share of the step, memory being a cap only. Gangs are launched widest first, on the ranks that are least
loaded; then short sequences go longest first to the least loaded rank, which packs its own in few micro-batches.
"""

from __future__ import annotations

import numpy as np

from ....core.balance.partition import Ints, best_fit_decreasing
from ....core.plan.step_plan import MicroBatch
from ..assign import Frame, Placed, placed
from ..cost_table import Prices, Shares
from ..emit.micro_batches import common_way, packs, whole

_ANY = 1 << 50
"""Tokens of a rank in all of its micro-batches together."""


def gangs(lengths: Ints, prices: Prices, shares: Shares, cap: int) -> list[MicroBatch] | None:
    """The micro-batches in launch order; None where a sequence fits nowhere. lengths int64 [K], ``shares`` theirs."""
    priced = shares.launching(*prices.launch, cap)
    frame = Frame(prices.limits.num_ranks, prices.node, _ANY, queued=True)
    found = placed(priced, np.arange(len(lengths)), frame)
    return None if found is None else _launched(lengths, found, prices, cap)


def _launched(lengths: Ints, found: Placed, prices: Prices, cap: int) -> list[MicroBatch] | None:
    pieces = whole(lengths, np.arange(len(lengths)))
    mine: list[list[int]] = [[] for _ in range(prices.limits.num_ranks)]
    shared: list[int] = []
    for k, home in enumerate(found.homes):
        if len(home) == 1:
            mine[home[0]].append(k)
        else:
            shared.append(k)
    out: list[MicroBatch] = []
    for k in sorted(shared, key=lambda k: found.turn[k]):
        home = found.homes[k]
        way = common_way([(pieces[k].length, home)], prices)
        if way is None:
            return None
        out.append(MicroBatch((pieces[k],), home, 0, way.engine, way.inner, routed=way.routed))
    local: list[list[MicroBatch]] = []
    for rank, numbers in enumerate(mine):
        bins = best_fit_decreasing([pieces[k].length for k in numbers], cap)
        local.append(packs(pieces, rank, [[numbers[i] for i in one] for one in bins]))
    for place in range(max(map(len, local), default=0)):
        out += [row[place] for row in local if place < len(row)]
    return out
