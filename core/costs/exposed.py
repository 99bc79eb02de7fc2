"""How long what a plan moves between ranks takes on a cluster's links, beyond the compute that hides it.

    hand-over      a stage's output to the next stage, its gradient back: ``state`` bytes a token
    tensor         two all-reduces of the hidden states a layer and direction, one more at the embedding and at the
                   output layer, over the tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053, section 3); nothing
                   hides them
    attention      a micro-batch on several ranks of the plane, by cp_comm (`attention_comm`); with `MicroBatch.remap`
                   what moved tokens have goes there and back, in each direction
    host           activations that wait there for the backward, hidden behind compute
    experts        tokens to their experts and back over ep ranks, in each layer that has any, by the rank of a round
                   (`rounds`) that sends or receives most, not hidden; expert weights of a micro-batch, hidden behind
                   its compute
    gradients      at the end of a step over the plane, experts' over every ep-th rank of it: all-reduce; with a sharded
                   optimizer reduce-scatter, and all-gather of the updated weights; with sharded parameters (ZeRO 3)
                   instead all-gather of weights in every pass and reduce-scatter of gradients in every backward, hidden
                   by nothing here; of a frozen model none
    adapters       of tenants: all-reduce of the gradients and all-gather of the updated values at the end of a step

All sizes are those of one pipeline stage of one tensor-parallel rank (`core.costs.context`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..aliases import Floats
from ..errors import EvenloadError
from ..machine.cluster import Cluster, Link
from ..plan.step_plan import MicroBatch
from ..plan.token_layout import token_counts
from .attention_comm import AttentionLoad, SharedLoad, alone_s, loads_of, shared_load_of, times_of, together_s
from .context import Direction, PlanningContext
from .costs import is_even


def exposed_s(
    context: PlanningContext, direction: Direction, micro_batch: MicroBatch, routed: float | None = None
) -> float:
    """Seconds of communication inside one pass that no compute hides: on each rank, or the most of any.

    ``routed``: tokens of the rank of its round that sends or receives most; None: of a rank of the micro-batch.
    """
    if not context.runs(direction.passes):
        return 0.0
    if not is_even(micro_batch):
        return float(exposed_of_ranks(context, direction, micro_batch, routed).max())
    degree = len(micro_batch.ranks)
    total = 0.0
    if context.layout.tp > 1 or context.layout.ep > 1:
        total += _modules_s(context, direction, micro_batch.ranks[0], micro_batch.num_padded_tokens / degree, routed)
    if degree > 1:
        load = loads_of(micro_batch).get(micro_batch.ranks) or AttentionLoad(1, 1, 0.0)
        times = times_of(context, direction, shared_load_of(micro_batch, micro_batch.ranks, load))
        total += float(alone_s(times))
    return total


def exposed_of_ranks(
    context: PlanningContext, direction: Direction, micro_batch: MicroBatch, routed: float | None = None
) -> Floats:
    """`exposed_s` of each rank of a micro-batch, in order: float64 [ranks]. A pass takes as long as its slowest."""
    ranks = micro_batch.ranks
    if is_even(micro_batch):
        return np.full(len(ranks), exposed_s(context, direction, micro_batch, routed))
    total = np.zeros(len(ranks))
    if not context.runs(direction.passes):
        return total
    if context.layout.tp > 1 or context.layout.ep > 1:
        total += _modules_s(context, direction, ranks[0], token_counts(micro_batch), routed)
    number = {rank: i for i, rank in enumerate(ranks)}
    local_s = np.zeros(len(ranks))
    cp_groups = []
    for cp_group, load in loads_of(micro_batch).items():
        if len(cp_group) == 1:
            local_s[number[cp_group[0]]] += direction.cost.pair_s * load.pairs
        else:
            times = times_of(context, direction, shared_load_of(micro_batch, cp_group, load))
            cp_groups.append(([number[rank] for rank in cp_group], times))
    total += together_s(cp_groups, local_s)
    if micro_batch.remap:
        total += _remap_s(context, direction.stage, micro_batch)
    return total


def _modules_s(context: PlanningContext, direction: Direction, rank: int, tokens: Any, routed: float | None) -> Any:
    """Tensor and expert parallelism of a rank of the plane that has so many tokens, a number or an array."""
    layout, cluster, traffic = context.layout, context.cluster, context.traffic
    cost, passes, stage = direction
    total = 0.0 * tokens
    if layout.tp > 1:
        (first,) = layout.world_ranks(stage, (rank,))
        link = cluster.link_among(range(first, first + layout.tp))
        # The embedding's forward on the first stage, the output layer's backward on the last.
        ends = stage == (0 if passes == 1 else layout.num_stages - 1)
        state_bytes = tokens * traffic.state_bytes_per_token
        total = total + (2 * traffic.layers + ends) * link.all_reduce_s(state_bytes, layout.tp)
    if layout.ep > 1 and traffic.expert_bytes_per_token:
        first = rank // layout.ep * layout.ep
        peers = layout.world_ranks(stage, range(first, first + layout.ep))
        sent_bytes = (tokens if routed is None else routed) * traffic.expert_bytes_per_token
        total = total + 2 * cluster.all_to_all_s(sent_bytes, peers, max(1, traffic.moe_layers))
        weights_s = cluster.all_to_all_s(traffic.expert_weight_bytes, peers) if traffic.expert_weight_bytes else 0.0
        total = total + np.maximum(0.0, weights_s - cost.launch_s - cost.linear_s * tokens)
    return total


def _remap_s(context: PlanningContext, stage: int, micro_batch: MicroBatch) -> Floats:
    """Q, K and V of the tokens that a rank gives or takes, there before attention, and its output back; each rank's. In
    a backward it is the output's gradient there and the three others back."""
    cluster, traffic = context.cluster, context.traffic
    token_bytes = 2 * traffic.query_bytes_per_token + traffic.kv_bytes_per_token
    total = np.zeros(len(micro_batch.ranks))
    nodes = [rank // cluster.ranks_per_node for rank in context.layout.world_ranks(stage, micro_batch.ranks)]
    for link, count in zip((cluster.intra, cluster.inter), moved_tokens(micro_batch, nodes), strict=True):
        total += np.where(count > 0, link.send_s(count * token_bytes, 2 * traffic.layers), 0.0)
    return total


def moved_tokens(micro_batch: MicroBatch, nodes: Sequence[int]) -> tuple[Floats, Floats]:
    """Tokens that a remap takes from or gives to each rank inside its node, and across: float64 [ranks] each.

    As `token_layout.layout_of` moves them: inside a node first, ranks of the plane in ascending order.
    """
    spare = token_counts(micro_batch._replace(remap=False)) - token_counts(micro_batch)
    inside = np.zeros(len(nodes))
    by_node: dict[int, list[int]] = {}
    for place in np.argsort(micro_batch.ranks).tolist():
        by_node.setdefault(nodes[place], []).append(place)
    for places in by_node.values():
        surplus, lack = np.maximum(spare[places], 0.0), np.maximum(-spare[places], 0.0)
        both = min(surplus.sum(), lack.sum())
        for counts in (surplus, lack):
            inside[places] += np.diff(np.minimum(np.cumsum(counts), both), prepend=0.0)
    return inside, np.abs(spare) - inside


def attention_s(context: PlanningContext, direction: Direction, shared: SharedLoad) -> Floats:
    """Communication that nothing hides in one pass of a sequence by itself: what sharing its attention costs.

    ``shared``: S sequences, each by itself on these ranks (`attention_comm.load_of`). Seconds, float64 [S]; infinite
    where more ranks share heads than there are.
    """
    if len(shared.ranks) == 1 or not context.runs(direction.passes):
        return np.zeros(len(shared.load.tokens))
    return np.asarray(alone_s(times_of(context, direction, shared)), dtype=np.float64)


def offload_s(cluster: Cluster, num_bytes: Any, hiding_s: Any) -> Any:
    """Seconds of moving activations to the host, or back, beyond the compute meanwhile. Raises EvenloadError."""
    if cluster.host_bytes_per_s is None:
        detail = f"cluster {cluster.name} has no host_bytes_per_s"
        raise EvenloadError("a plan leaves activations in host memory", detail, "add the rate, or offload nothing")
    return np.maximum(0.0, num_bytes / cluster.host_bytes_per_s - hiding_s)


def links_up(context: PlanningContext, stage: int) -> list[Link]:
    """For each rank of the plane its link from a stage to the next, and back."""
    plane = range(context.layout.dp_cp_size)
    ends = (context.layout.world_ranks(end, plane) for end in (stage, stage + 1))
    return [context.cluster.link_among(pair) for pair in zip(*ends, strict=True)]


def gradient_sum_s(context: PlanningContext, stage: int) -> float:
    """Seconds of the gradient sum of a stage at the end of a step, the gathering of updated weights included."""
    context = context.at(stage)
    traffic, total = context.traffic, 0.0
    if context.forward_only:
        return total
    if context.frozen:
        return _adapters_s(context, stage)
    for share, n, link in _sharers(context, stage) if traffic.sharding != "parameters" else ():
        gradient_bytes, weight_bytes = share * traffic.gradient_bytes, share * traffic.weight_bytes
        if traffic.sharding == "optimizer":
            total += link.all_gather_s(gradient_bytes / n, n) + link.all_gather_s(weight_bytes / n, n)
        else:
            total += link.all_reduce_s(gradient_bytes, n)
    return total


def _adapters_s(context: PlanningContext, stage: int) -> float:
    """Seconds of the sum of adapters' gradients over the plane, the gathering of updated values included."""
    num_bytes, n = context.traffic.adapter_bytes, context.layout.dp_cp_size
    if not num_bytes or n == 1:
        return 0.0
    link = context.cluster.link_among(context.layout.world_ranks(stage, range(n)))
    return link.all_reduce_s(num_bytes, n) + link.all_gather_s(num_bytes / n, n)


def gathering_s(context: PlanningContext, passes: int) -> float:
    """Seconds of weights gathered (and gradients scattered in a backward, ``passes`` 2) in a pass with ZeRO 3."""
    traffic, total = context.traffic, 0.0
    if not context.runs(passes):
        return total
    for share, n, link in _sharers(context, 0) if traffic.sharding == "parameters" else ():
        total += link.all_gather_s(share * traffic.weight_bytes / n, n)
        total += link.all_gather_s(share * traffic.gradient_bytes / n, n) if passes > 1 and not context.frozen else 0.0
    return total


def _sharers(context: PlanningContext, stage: int) -> Iterator[tuple[float, int, Link]]:
    """Shares of a rank's weights, how many ranks have the same ones, and the link among these, where others have."""
    layout, experts = context.layout, context.traffic.expert_frac
    for share, apart in ((1.0 - experts, 1), (experts, layout.ep)):
        ranks = range(0, layout.dp_cp_size, apart)
        if share and len(ranks) > 1:
            yield share, len(ranks), context.cluster.link_among(layout.world_ranks(stage, ranks))
