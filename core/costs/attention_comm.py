"""Seconds that ranks which share attention spend on communication, cp_comm by cp_comm.

A CP group of d ranks is g = d / u groups of u ranks that share heads (`core.plan.token_layout`). Of all layers of a
stage, with T tokens of its slices, R tokens whose keys and values they read (T and the prefixes), P (query, key) pairs:

    inside groups   Q, K, V and the output of T / d tokens a rank change places, twice a layer and direction (Jacobs et
                    al., arXiv 2309.14509, section 3); nothing hides it. A key head that query heads of several ranks
                    read travels to each of them. Where u does not divide the heads, all wait for the rank of most.
    ring            K and V of R / d tokens a rank hop on while the block at hand is computed, P / (d g) pairs:
                        forward     g - 1 times  max(0, hop - block)
                        backward    K and V as above; their gradients follow one block later, g hops, the last of
                                    which, back to its rank, nothing hides (Liu et al., arXiv 2310.01889, section 3)
    all-gather      K and V of R tokens to all; backward: again, and their gradients summed back. No attention of the
                    CP group itself hides it

All ranks hop at once, so a hop takes as long as the slowest of its links: ranks in the order of their nodes cross only
at the nodes' borders. Routed, what k ranks of a node send across goes over the NICs of all x members there
(Zeppelin, arXiv 2509.21841):

    hop = k n / (x b_inter) + 2 n (x - 1) / (x b_intra)         n bytes a rank, b bytes/s; plain: n / b_inter

Slices of other CP groups on the same rank compute while a hop travels, those of one rank alone while the first hop or
the gathering does; what a rank's CP groups send follows one another, as it does on one communicator.

Engine "" is the trainer's own static context parallelism, by `Traffic.cp_comm`: latencies of all-to-all and all-gather
once a pass, gradients in a ring as wide as K and V.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..aliases import Floats
from ..machine.cluster import Cluster
from ..plan.step_plan import CpComm, MicroBatch
from .context import Direction, PlanningContext, Traffic


class AttentionLoad(NamedTuple):
    """Attention of a CP group's slices together; each a float, or float64 [S] for S CP groups of the same ranks."""

    tokens: Any
    rows: Any
    """Tokens whose keys and values are read: ``tokens`` and all prefixes."""
    pairs: Any


class SharedLoad(NamedTuple):
    """What ranks attend for together, and how they share it: a CP group of one or more slices."""

    ranks: tuple[int, ...]
    """Of the plane, in the order of their places."""
    load: AttentionLoad
    cp_comm: CpComm
    ulysses_degree: int = 0
    """Ranks of a group that shares heads, where the cp_comm is hybrid."""
    routed: bool = False


class Times(NamedTuple):
    """Communication of a CP group in one pass, floats or float64 [S]."""

    open_s: Any
    """Nothing hides it."""
    first_s: Any = 0.0
    """Only what a rank computes for itself alone hides it."""
    hop_s: Any = 0.0
    """K and V to the next group."""
    grad_s: Any = 0.0
    """Their gradients to the next group; 0 in a forward."""
    block_s: Any = 0.0
    """Attention of a rank between two hops."""
    groups: int = 1


def loads_of(micro_batch: MicroBatch) -> dict[tuple[int, ...], AttentionLoad]:
    """What every CP group of a micro-batch attends for, by its ranks; with their padding, where slices have it."""
    pad = micro_batch.pad_to
    sums_of: dict[tuple[int, ...], list[float]] = {}
    known, sums = None, list[float]()
    for (_, start, stop), cp_group in zip(micro_batch.slices, micro_batch.ranks_of_slices, strict=True):
        n = pad or stop - start
        if cp_group is not known:  # the hash of many ranks takes long
            known, sums = cp_group, sums_of.setdefault(cp_group, [0, 0, 0.0])
        sums[0] += n
        sums[1] += start + n
        sums[2] += n * (start + 0.5 * n)
    return {cp_group: AttentionLoad(*sums) for cp_group, sums in sums_of.items()}


def load_of(pieces: npt.ArrayLike) -> AttentionLoad:
    """What S sequences attend for, each by itself; ``pieces``: (tokens, tokens before them) [S, 2]."""
    rows = np.asarray(pieces, dtype=np.float64).reshape(-1, 2)
    tokens, prefix = rows[:, 0], rows[:, 1]
    return AttentionLoad(tokens, tokens + prefix, tokens * (prefix + 0.5 * tokens))


def shared_load_of(micro_batch: MicroBatch, ranks: tuple[int, ...], load: AttentionLoad) -> SharedLoad:
    """What one of the CP groups of a micro-batch shares."""
    return SharedLoad(ranks, load, micro_batch.cp_comm, micro_batch.ulysses_degree, micro_batch.routed)


def alone_s(times: Times) -> Any:
    """Seconds that nothing hides on a rank that has no other CP group."""
    open_s, first, hop, grad, block, groups = times
    open_s = open_s + first
    if groups == 1:
        return open_s
    between = np.maximum(0.0, hop + grad - block)
    ends = np.maximum(0.0, hop - block) + np.maximum(0.0, grad - block)
    return open_s + ends + (groups - 2) * between + grad


def together_s(cp_groups: Iterable[tuple[Sequence[int], Times]], local_s: Floats) -> Floats:
    """Seconds that nothing hides on each of R ranks, which take turns in several CP groups: float64 [R].

    ``cp_groups``: numbers of the ranks, 0 .. R - 1, in each CP group and its times, floats. ``local_s`` float64 [R]:
    attention that a rank computes for itself while its first hops travel.
    """
    rows = [(list(ranks), times) for ranks, times in cp_groups]
    if not rows:
        return np.zeros_like(local_s)
    where = np.concatenate([ranks for ranks, _ in rows])
    sizes = [len(ranks) for ranks, _ in rows]
    columns = np.array([times for _, times in rows], dtype=np.float64)[:, :, None]
    open_s, first, hop, grad, block, groups = columns.transpose(1, 0, 2)
    # What is under way while block k is computed changes at these k only; a group's last gradients travel at its k = g.
    numbers = {1, *(times.groups for _, times in rows)} - {1}
    edges = np.array(sorted({0, 1, *(g + more for g in numbers for more in (-1, 0, 1))}))
    k, widths = edges[:-1], np.diff(edges)
    net = (
        first * (k == 0)
        + hop * (k < groups - 1)
        + grad * ((k >= 1) & (k <= groups)) * (groups > 1)
        - block * (k < groups)
    )
    exposed = np.zeros((len(local_s), len(k) + 1))
    np.add.at(exposed, where, np.repeat(np.concatenate([net, open_s], axis=1), sizes, axis=0))
    exposed[:, 0] -= local_s
    total: Floats = np.maximum(exposed[:, :-1], 0.0) @ widths + exposed[:, -1]
    return total


def times_of(context: PlanningContext, direction: Direction, shared: SharedLoad) -> Times:
    """Communication of a CP group in a pass. Infinite where more ranks share heads than there are."""
    traffic, cluster = context.traffic, context.cluster
    cost, passes, stage = direction
    ranks, load, cp_comm, ulysses_degree, routed = shared
    peers, degree = context.layout.world_ranks(stage, ranks), len(ranks)
    if not cp_comm:
        return Times(_static_s(context, direction, peers, load))
    share = {"all_to_all": degree, "hybrid": ulysses_degree}.get(cp_comm, 1)
    groups = degree // share
    copies, open_s = 1.0, 0.0 * load.tokens
    if share > 1:
        copies, busiest = head_shares(traffic, share)
        if copies == float("inf"):
            return Times(open_s + copies)
        sent = load.tokens / degree * (2 * traffic.query_bytes_per_token + copies * traffic.kv_bytes_per_token)
        exchanges = max(
            (peers[at : at + share] for at in range(0, degree, share)),
            key=lambda group: cluster.link_among(group).all_to_all_s(1.0, share),
        )
        open_s = cluster.all_to_all_s(sent, exchanges, 2 * traffic.layers)
        open_s = open_s + (busiest - 1.0) * cost.pair_s * load.pairs / degree
    block_s = cost.pair_s * load.pairs / degree / groups
    if groups == 1:
        return Times(open_s, block_s=block_s)
    sent = load.rows / degree * copies * traffic.kv_bytes_per_token
    grads = sent * traffic.kv_grad_frac if passes > 1 else 0.0
    if cp_comm == "all_gather":
        link = cluster.link_among(peers)
        back_s = link.all_gather_s(grads, degree, traffic.layers) if passes > 1 else open_s
        return Times(back_s, link.all_gather_s(sent, degree, traffic.layers))
    latency_s, byte_s = _hops(cluster, peers, share, routed)
    hop_s, grad_s = (traffic.layers * latency_s + num_bytes * byte_s for num_bytes in (sent, grads))
    return Times(open_s, 0.0, hop_s, grad_s if passes > 1 else 0.0, block_s, groups)


def head_shares(traffic: Traffic, ranks: int) -> tuple[float, float]:
    """Copies of each key head that so many ranks need, and heads of the busiest of them over the mean.

    (1, 1) where the number of heads is not known.
    """
    per_key = 2 * traffic.query_bytes_per_token / traffic.kv_bytes_per_token if traffic.kv_bytes_per_token else 1.0
    return _head_shares(traffic.heads, max(1, round(per_key)), ranks)


@cache
def _head_shares(heads: int, per_key: int, ranks: int) -> tuple[float, float]:
    if not heads:
        return 1.0, 1.0
    if ranks > heads:
        return float("inf"), float("inf")
    bounds = [i * heads // ranks for i in range(ranks + 1)]
    shares = list(pairwise(bounds))
    needed = sum((end - 1) // per_key + 1 - first // per_key for first, end in shares)
    return needed * per_key / heads, max(end - first for first, end in shares) * ranks / heads


def _hops(cluster: Cluster, peers: Sequence[int], step: int, routed: bool) -> tuple[float, float]:
    """From every peer to the one ``step`` places on: latency and seconds a byte of a rank of the slowest link used."""
    intra, inter = cluster.intra, cluster.inter
    nodes = [rank // cluster.ranks_per_node for rank in peers]
    if min(nodes) == max(nodes):
        return intra.latency_s, 1 / intra.bytes_per_s
    members = min(Counter(nodes).values())
    if not routed or members == 1:
        return inter.latency_s, 1 / inter.bytes_per_s
    senders = Counter(here for here, there in zip(nodes, nodes[step:] + nodes[:step], strict=True) if here != there)
    across = max(senders.values()) / members / inter.bytes_per_s
    return inter.latency_s + 2 * intra.latency_s, across + 2 * (members - 1) / members / intra.bytes_per_s


def _static_s(context: PlanningContext, direction: Direction, peers: Sequence[int], load: AttentionLoad) -> Any:
    traffic, cluster, degree = context.traffic, context.cluster, len(peers)
    cost, passes, _ = direction
    if traffic.cp_comm == "all_to_all":
        sent = load.tokens / degree * (2 * traffic.query_bytes_per_token + traffic.kv_bytes_per_token)
        return cluster.all_to_all_s(sent, peers)
    link, each = cluster.link_among(peers), load.rows / degree * traffic.kv_bytes_per_token
    if traffic.cp_comm == "all_gather":
        return passes * link.all_gather_s(each, degree)
    hops_s = passes * (degree - 1) * (traffic.layers * link.latency_s + each / link.bytes_per_s)
    return np.maximum(0.0, hops_s - cost.pair_s * load.pairs / degree * (degree - 1) / degree)
