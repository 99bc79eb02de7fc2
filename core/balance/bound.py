"""A certified lower bound on the busiest rank of any plan of a batch, cut or not."""

from __future__ import annotations

import numpy as np

from ..aliases import Ints
from ..costs.costs import Costs
from ..plan.limits import Limits


def lower_bound_s(lengths: Ints, limits: Limits, costs: Costs, head_frac: float = 0.0) -> float:
    """No plan that keeps each sequence on one rank has a busiest rank below this [s]. lengths int64 [K].

    ``head_frac``: share of the forward's ``token_s`` that is the output layer's.

    Cutting a sequence changes no sum: the slices of n tokens cost what the whole does, and one launch each. So it is
    the largest of: the mean over ranks, with the fewest launches that the tokens need; the costliest sequence with the
    launches that it needs, of whose parts at experts the rank may have an ep-th; and the rank of most tokens in the
    group of most, which has at least the mean number, its launches and its linear work. Where the recipe recomputes,
    backwards hold a forward already, and a host that replays need not run another one at the last stage but for keys
    and values: those of all tokens but the most that one slice can hold.
    """
    if not len(lengths):
        return 0.0
    cap, prefix_s = limits.max_tokens, np.zeros(len(lengths))
    if costs.recompute and not limits.whole_sequences:
        last, forward = 1.0 / limits.num_stages, costs.forward
        layers = forward.model_copy(update={"token_s": forward.token_s * (1.0 - head_frac)}).at_experts(1.0 / costs.ep)
        prefix_s = last * layers.seconds(np.maximum(0, lengths - cap))
        costs = costs.model_copy(update={"forward": forward.scaled(1.0 - last, 1.0 - last)})
    seconds = costs.sequence_s(lengths) + prefix_s
    launches = max(min(limits.num_ranks, len(lengths)), -(-int(lengths.sum()) // cap))
    mean = (float(seconds.sum()) + launches * costs.launch_s) / limits.num_ranks
    tokens = float(lengths.sum()) / limits.num_ranks
    most_tokens = (costs.forward.linear_s + costs.backward.linear_s) * tokens + -(-tokens // cap) * costs.launch_s
    elsewhere_s = costs.both.expert_s * (1.0 - 1.0 / costs.ep)
    alone = float(np.max(seconds - elsewhere_s * lengths + -(-lengths // cap) * costs.launch_s))
    return max(mean, most_tokens, alone)
