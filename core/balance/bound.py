"""A certified lower bound on the busiest rank of any plan of a batch, cut or not."""

from __future__ import annotations

import numpy as np

from ..aliases import Ints
from ..costs.costs import Costs
from ..plan.limits import Limits


def lower_bound_s(lengths: Ints, limits: Limits, costs: Costs) -> float:
    """No plan that keeps each sequence on one rank has a busiest rank below this [s]. lengths int64 [K].

    Cutting a sequence changes no sum: the slices of n tokens cost what the whole does, and one launch each. So it is
    the largest of: the mean over ranks, with the fewest launches that the tokens need; the costliest sequence with the
    launches that it needs; and the rank of most tokens, which has at least the mean number, its launches and its
    linear work.
    """
    if not len(lengths):
        return 0.0
    seconds = costs.sequence_s(lengths)
    cap = limits.max_tokens
    launches = max(min(limits.num_ranks, len(lengths)), -(-int(lengths.sum()) // cap))
    mean = (float(seconds.sum()) + launches * costs.launch_s) / limits.num_ranks
    tokens = float(lengths.sum()) / limits.num_ranks
    most_tokens = (costs.forward.token_s + costs.backward.token_s) * tokens + -(-tokens // cap) * costs.launch_s
    alone = float(np.max(seconds + -(-lengths // cap) * costs.launch_s))
    return max(mean, most_tokens, alone)
