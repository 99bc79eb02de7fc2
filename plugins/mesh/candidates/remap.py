"""A round whose modules other than attention run on equally many tokens of every rank (Zeppelin's remap layer).

Ranks that long sequences keep busy hold few tokens, so where rounds are nearly full the others would have to hold more
than they may. With tokens moved (`core.parts.layout_of`) a rank's time is

    attention of its CP groups + linear work of  sum of tokens / N  + what moves

so only attention is levelled over ranks and, outside it, tokens, which leaves few of them to be moved.
"""

from __future__ import annotations

from dataclasses import replace

from ....core.aliases import Ints
from ....core.plan.step_plan import MicroBatch
from ..assign import Frame, placed
from ..cost_table import CostTable, SequenceCosts
from ..emit.micro_batches import joined, whole

_ANY = 1 << 50
"""Tokens of a rank before they are moved."""


def remapped(lengths: Ints, numbers: Ints, shares: SequenceCosts, cost_table: CostTable) -> MicroBatch | None:
    """The round as one micro-batch of all ranks; None where these cannot hold it, or no cp_comm suits all.

    lengths int64 [K] of the batch, ``numbers`` int64 [k] of the round; ``shares`` are without a cap of tokens.
    """
    limits, costs = cost_table.limits, cost_table.context.costs
    total = int(lengths[numbers].sum())
    if not limits.num_ranks <= total <= limits.num_ranks * limits.max_tokens:
        return None
    token_s = costs.forward.linear_s + costs.backward.linear_s
    linear = token_s * lengths[:, None] / shares.degrees
    by_kind = replace(shares, forward=shares.seconds - linear, backward=linear)  # infinite where it was
    assignment = placed(by_kind, numbers, Frame(limits.num_ranks, cost_table.node, _ANY))
    micro_batch = assignment and joined(
        list(zip(whole(lengths, numbers), assignment.cp_groups, strict=True)), cost_table
    )
    if micro_batch is None or len(micro_batch.ranks) == 1:
        return None
    return micro_batch._replace(ranks=tuple(range(limits.num_ranks)), cp_groups=micro_batch.ranks_of_slices, remap=True)
