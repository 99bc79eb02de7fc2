"""Hybrid DP: each long sequence alone on as many ranks as it deserves, short ones packed on single ranks.

ByteScale's balanced hybrid data parallelism (arXiv 2502.21231, section 5): ranks run different numbers of micro-batches
and meet once, at the sum of gradients. There a sequence gets as many ranks as its tokens fill; here as many as bring it
under its share of the step, memory being a cap only. Shared ones are launched widest first, on the ranks that are least
loaded; then short sequences go longest first to the least loaded rank, which packs its own in few micro-batches.
"""

from __future__ import annotations

import numpy as np

from ....core.aliases import Ints
from ....core.balance.partition import best_fit_decreasing
from ....core.plan.step_plan import MicroBatch, Slice
from ..assign import Assignment, Frame, placed
from ..cost_table import CostTable, SequenceCosts
from ..emit.micro_batches import common_strategy, in_packs

_ANY = 1 << 50
"""Tokens of a rank in all of its micro-batches together."""


def hybrid_dp(lengths: Ints, cost_table: CostTable, shares: SequenceCosts, cap: int) -> list[MicroBatch] | None:
    """The micro-batches in launch order; None where a sequence fits nowhere. lengths int64 [K], ``shares`` theirs."""
    priced = shares.launching(*cost_table.launch, cap)
    frame = Frame(cost_table.limits.num_ranks, cost_table.node, _ANY, queued=True)
    assignment = placed(priced, np.arange(len(lengths)), frame)
    return None if assignment is None else _launched(lengths, assignment, cost_table, cap)


def _launched(lengths: Ints, assignment: Assignment, cost_table: CostTable, cap: int) -> list[MicroBatch] | None:
    alone: list[list[int]] = [[] for _ in range(cost_table.limits.num_ranks)]
    shared: list[int] = []
    for k, cp_group in enumerate(assignment.cp_groups):
        (alone[cp_group[0]] if len(cp_group) == 1 else shared).append(k)
    launched: list[MicroBatch] = []
    for k in sorted(shared, key=lambda k: assignment.turn[k]):
        piece, cp_group = Slice(k, 0, int(lengths[k])), assignment.cp_groups[k]
        strategy = common_strategy([(piece.length, cp_group)], cost_table)
        if strategy is None:
            return None
        launched.append(strategy.micro_batch((piece,), cp_group))
    return launched + in_packs(lengths, [best_fit_decreasing(lengths, cap, numbers) for numbers in alone])
