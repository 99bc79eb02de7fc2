"""What a plan moves between ranks, in bytes, and how long that takes on a cluster's links.

    hand-over      a stage's output to the next stage, its gradient back: ``state`` bytes a token
    tensor         two all-reduces of the hidden states a layer and direction, one more at the embedding and at the
                   output layer, over the tensor-parallel ranks (Shoeybi et al., arXiv 1909.08053, section 3); nothing
                   hides them
    attention      a micro-batch on d ranks of the plane, by cp_comm (`sharing` has the formulas):
                     ring        K and V go round in d - 1 hops (backward: dK and dV too), hidden behind attention
                     all_to_all  Q, K, V and the output change from sequence to head shards and back
                                 (Jacobs et al., arXiv 2309.14509, section 3); nothing hides it
                     hybrid      all_to_all inside groups, a ring across them
                     all_gather  K and V of all tokens to all (backward: their gradients summed back); not hidden
                   with `MicroBatch.remap` what moved tokens have goes there and back, in each direction
    host           activations that wait there for the backward, hidden behind compute
    experts        tokens to their experts and back over ep ranks, not hidden; expert weights of a micro-batch, hidden
                   behind its compute
    gradients      at the end of a step over the plane: all-reduce; with a sharded optimizer reduce-scatter, and
                   all-gather of the updated weights; with sharded parameters (ZeRO 3) instead all-gather of weights in
                   every pass and reduce-scatter of gradients in every backward, hidden by nothing here

All sizes are those of one pipeline stage of one tensor-parallel rank. Ranks are numbered as Megatron does: tensor
parallel fastest, then the plane, pipeline stages slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..aliases import Floats
from ..errors import EvenloadError
from ..machine.cluster import Cluster, Link
from ..machine.layout import Layout
from ..plan.step_plan import CpComm, MicroBatch
from ..plan.token_layout import tokens_of_ranks
from .attention_comm import Load, Times, alone_s, loads_of, times_of, together_s
from .costs import PassCost, is_even

Sharding = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True)
class Traffic:
    """Bytes; zero means that nothing moves, so the default predicts compute alone."""

    layers: int = 1
    """Layers of a stage; ``query`` and ``kv`` are of all of them together."""
    state_bytes_per_token: float = 0.0
    query_bytes_per_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    """K and V together."""
    kv_grad_frac: float = 1.0
    """Bytes of dK and dV over those of K and V: 2 where half precision is summed in float32."""
    heads: int = 0
    """Query heads of one tensor-parallel rank; 0: not known, then ranks that share heads divide them evenly."""
    cp_comm: CpComm = "ring"
    """Of micro-batches on several ranks that name none: what the trainer's static context parallelism does."""
    gradient_bytes: float = 0.0
    weight_bytes: float = 0.0
    sharding: Sharding = "none"
    overlap_gradients: bool = False
    """The gradient sum runs while the last backward of the step does."""
    waits_for_sends: bool = False
    """A stage of the host's own schedule goes on only when its output has arrived."""
    expert_bytes_per_token: float = 0.0
    """Hidden states a token sends to experts, all MoE layers together, one way; as much comes back."""
    expert_weight_bytes: float = 0.0
    """Weights of experts that a rank takes in for one pass of a micro-batch."""


NO_TRAFFIC = Traffic()


def world_ranks(layout: Layout, stage: int, plane_ranks: tuple[int, ...], tp_rank: int = 0) -> list[int]:
    """Ranks of the world at a stage for ranks of the plane."""
    first = stage * layout.dp_cp_size
    return [(first + rank) * layout.tp + tp_rank for rank in plane_ranks]


def exposed_s(
    traffic: Traffic, cluster: Cluster, layout: Layout, stage: int, micro_batch: MicroBatch, cost: PassCost, passes: int
) -> float:
    """Seconds of communication inside one pass that no compute hides: on each rank, or the most of any.

    ``cost`` is that of the direction (attention hides a ring), ``passes`` 1 for a forward, 2 for a backward that moves
    gradients as well as values.
    """
    if not is_even(micro_batch):
        return float(exposed_of_ranks(traffic, cluster, layout, stage, micro_batch, cost, passes).max())
    degree = len(micro_batch.ranks)
    total = 0.0
    if layout.tp > 1 or layout.ep > 1:
        tokens = micro_batch.num_padded_tokens / degree
        total += _modules_s(traffic, cluster, layout, stage, micro_batch.ranks[0], tokens, cost, passes)
    if degree > 1:
        load = loads_of(micro_batch).get(micro_batch.ranks) or Load(1, 1, 0.0)
        times = _times_of(traffic, cluster, layout, stage, micro_batch, micro_batch.ranks, load, cost, passes)
        total += float(alone_s(times))
    return total


def exposed_of_ranks(
    traffic: Traffic, cluster: Cluster, layout: Layout, stage: int, micro_batch: MicroBatch, cost: PassCost, passes: int
) -> Floats:
    """The same of each rank of a micro-batch, in their order: float64 [ranks]. A pass takes as long as its slowest."""
    ranks = micro_batch.ranks
    if is_even(micro_batch):
        return np.full(len(ranks), exposed_s(traffic, cluster, layout, stage, micro_batch, cost, passes))
    total = np.zeros(len(ranks))
    if layout.tp > 1 or layout.ep > 1:
        total += _modules_s(traffic, cluster, layout, stage, ranks[0], _tokens(micro_batch), cost, passes)
    number = {rank: i for i, rank in enumerate(ranks)}
    local_s = np.zeros(len(ranks))
    cp_groups = []
    for cp_group, load in loads_of(micro_batch).items():
        if len(cp_group) == 1:
            local_s[number[cp_group[0]]] += cost.pair_s * load.pairs
        else:
            times = _times_of(traffic, cluster, layout, stage, micro_batch, cp_group, load, cost, passes)
            cp_groups.append(([number[rank] for rank in cp_group], times))
    total += together_s(cp_groups, local_s)
    if micro_batch.remap:
        total += _remap_s(traffic, cluster, layout, stage, micro_batch)
    return total


def _tokens(micro_batch: MicroBatch) -> Floats:
    """Of every rank of a micro-batch [ranks]."""
    return np.fromiter(tokens_of_ranks(micro_batch).values(), dtype=np.float64)


def _modules_s(
    traffic: Traffic, cluster: Cluster, layout: Layout, stage: int, rank: int, tokens: Any, cost: PassCost, passes: int
) -> Any:
    """Tensor and expert parallelism of a rank of the plane that has so many tokens, a number or an array."""
    total = 0.0 * tokens
    if layout.tp > 1:
        mine = world_ranks(layout, stage, (rank,))[0]
        link = cluster.link_among(range(mine, mine + layout.tp))
        # The embedding's forward on the first stage, the output layer's backward on the last.
        ends = stage == (0 if passes == 1 else layout.pp - 1)
        state_bytes = tokens * traffic.state_bytes_per_token
        total = total + (2 * traffic.layers + ends) * link.all_reduce_s(state_bytes, layout.tp)
    if layout.ep > 1 and traffic.expert_bytes_per_token:
        first = rank // layout.ep * layout.ep
        peers = world_ranks(layout, stage, tuple(range(first, first + layout.ep)))
        total = total + 2 * cluster.all_to_all_s(tokens * traffic.expert_bytes_per_token, peers)
        weights_s = cluster.all_to_all_s(traffic.expert_weight_bytes, peers) if traffic.expert_weight_bytes else 0.0
        total = total + np.maximum(0.0, weights_s - cost.launch_s - cost.token_s * tokens)
    return total


def _remap_s(traffic: Traffic, cluster: Cluster, layout: Layout, stage: int, micro_batch: MicroBatch) -> Floats:
    """Q, K and V of the tokens that a rank gives or takes, there before attention, and its output back; each rank's.

    In a backward it is the output's gradient there and the three others back.
    """
    token_bytes = 2 * traffic.query_bytes_per_token + traffic.kv_bytes_per_token
    total = np.zeros(len(micro_batch.ranks))
    nodes = [rank // cluster.ranks_per_node for rank in world_ranks(layout, stage, micro_batch.ranks)]
    for link, count in zip((cluster.intra, cluster.inter), moved_tokens(micro_batch, nodes), strict=True):
        total += np.where(count > 0, link.send_s(count * token_bytes, 2 * traffic.layers), 0.0)
    return total


def moved_tokens(micro_batch: MicroBatch, nodes: Sequence[int]) -> tuple[Floats, Floats]:
    """Tokens that a remap takes from or gives to each rank inside its node, and across: float64 [ranks] each.

    As `parts.layout_of` moves them: inside a node first, ranks of the plane in ascending order.
    """
    spare = _tokens(micro_batch._replace(remap=False)) - _tokens(micro_batch)
    inside = np.zeros(len(nodes))
    by_node: dict[int, list[int]] = {}
    for place in np.argsort(micro_batch.ranks).tolist():
        by_node.setdefault(nodes[place], []).append(place)
    for mine in by_node.values():
        given, taken = np.maximum(spare[mine], 0.0), np.maximum(-spare[mine], 0.0)
        both = min(given.sum(), taken.sum())
        for counts in (given, taken):
            inside[mine] += np.diff(np.minimum(np.cumsum(counts), both), prepend=0.0)
    return inside, np.abs(spare) - inside


def attention_s(
    traffic: Traffic,
    cluster: Cluster,
    layout: Layout,
    stage: int,
    pieces: npt.ArrayLike,
    ranks: tuple[int, ...],
    cp_comm: CpComm,
    ulysses_degree: int,
    cost: PassCost,
    passes: int,
    routed: bool = False,
) -> Floats:
    """Communication that nothing hides in one pass of a sequence by itself: what sharing its attention costs.

    Args:
        pieces: (tokens, tokens before them) of S sequences, each by itself on these ranks: [S, 2].
        ranks: of the plane, in the order of their places.
        inner: ranks of a group that shares heads, where the cp_comm is hybrid.
        cost: of the direction.
        passes: 1 for a forward, 2 for a backward.

    Returns:
        Seconds, float64 [S]; infinite where more ranks share heads than there are.
    """
    rows = np.asarray(pieces, dtype=np.float64).reshape(-1, 2)
    tokens, prefix = rows[:, 0], rows[:, 1]
    if len(ranks) == 1:
        return np.zeros(len(rows))
    peers = world_ranks(layout, stage, ranks)
    load = Load(tokens, tokens + prefix, tokens * (prefix + 0.5 * tokens))
    times = times_of(traffic, cluster, peers, load, cp_comm, ulysses_degree, cost, passes, routed)
    return np.asarray(alone_s(times), dtype=np.float64)


def _times_of(
    traffic: Traffic,
    cluster: Cluster,
    layout: Layout,
    stage: int,
    micro_batch: MicroBatch,
    cp_group: tuple[int, ...],
    load: Load,
    cost: PassCost,
    passes: int,
) -> Times:
    peers = world_ranks(layout, stage, cp_group)
    cp_comm, ulysses_degree, routed = micro_batch.cp_comm, micro_batch.ulysses_degree, micro_batch.routed
    return times_of(traffic, cluster, peers, load, cp_comm, ulysses_degree, cost, passes, routed)


def offload_s(cluster: Cluster, num_bytes: Any, hiding_s: Any) -> Any:
    """Seconds of moving activations to the host, or back, beyond the compute meanwhile. Raises EvenloadError."""
    if cluster.host_bytes_per_s is None:
        found = f"cluster {cluster.name} has no host_bytes_per_s"
        raise EvenloadError("a plan leaves activations in host memory", found, "add the rate, or offload nothing")
    return np.maximum(0.0, num_bytes / cluster.host_bytes_per_s - hiding_s)


def links_up(cluster: Cluster, layout: Layout, stage: int) -> list[Link]:
    """For each rank of the plane its link from a stage to the next, and back."""
    firsts = [[(s * layout.dp_cp_size + r) * layout.tp for r in range(layout.dp_cp_size)] for s in (stage, stage + 1)]
    return [cluster.link_among(ends) for ends in zip(*firsts, strict=True)]


def gradient_sum_s(traffic: Traffic, cluster: Cluster, layout: Layout, stage: int) -> float:
    """Seconds of the gradient sum of a stage at the end of a step, the gathering of updated weights included."""
    if layout.dp_cp_size == 1 or traffic.sharding == "parameters":
        return 0.0
    peers = world_ranks(layout, stage, tuple(range(layout.dp_cp_size)))
    link, n = cluster.link_among(peers), layout.dp_cp_size
    if traffic.sharding == "optimizer":
        return link.all_gather_s(traffic.gradient_bytes / n, n) + link.all_gather_s(traffic.weight_bytes / n, n)
    return link.all_reduce_s(traffic.gradient_bytes, n)


def gathering_s(traffic: Traffic, cluster: Cluster, layout: Layout, passes: int) -> float:
    """Seconds of weights gathered (and gradients scattered in a backward, ``passes`` 2) in a pass with ZeRO 3."""
    if layout.dp_cp_size == 1 or traffic.sharding != "parameters":
        return 0.0
    n = layout.dp_cp_size
    link = cluster.link_among(world_ranks(layout, 0, tuple(range(n))))
    total = link.all_gather_s(traffic.weight_bytes / n, n)
    return total + (link.all_gather_s(traffic.gradient_bytes / n, n) if passes > 1 else 0.0)
