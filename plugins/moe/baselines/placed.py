"""EPLB and LAER-MoE: experts placed by the loads of earlier steps, busier ones on more ranks, their tokens evenly.

Both give every expert one place and each further place to the expert with the highest load a place. EPLB (DeepSeek's
Expert Parallelism Load Balancer, its global policy) packs these, the heaviest first, on the least loaded rank with a
free place. LAER-MoE (arXiv 2602.11686) looks for that rank on the nodes with the fewest places of the expert, also
tries equally many places for every expert, and keeps tokens inside their node where an expert has a place there. Here
its trials are judged by the busiest rank alone. Neither asks where an expert's parameters are.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....core.aliases import Ints
from ....core.experts.quotas import ranks_of_experts
from ....core.plan.expert_policy import ExpertPolicy, LayerCopies
from ..history import places_by_load


def eplb_copies(loads_E: Sequence[float], num_ranks: int, policy: ExpertPolicy) -> LayerCopies:
    """The experts of each rank, as many as it has at home and slots more."""
    return _packed(loads_E, places_by_load(loads_E, num_ranks, policy.slots), num_ranks, num_ranks)


def laer_copies(loads_E: Sequence[float], num_ranks: int, policy: ExpertPolicy) -> LayerCopies:
    """LAER-MoE's copies: by places in proportion to load or equally many each, whichever leaves the busiest rank less
    to do."""
    num_experts, size = len(loads_E), policy.node_ranks or num_ranks
    each, rest = divmod(num_experts + num_ranks * policy.slots, num_experts)
    trials = [places_by_load(loads_E, num_ranks, policy.slots)] + (
        [[min(each, num_ranks)] * num_experts] if not rest else []
    )
    layouts = [_packed(loads_E, places, num_ranks, size) for places in trials]
    counts_RE = np.rint(np.array([loads_E] * num_ranks) * (1e9 / max(sum(loads_E), 1e-9))).astype(np.int64)
    return min(layouts, key=lambda copies: int(inside_nodes(counts_RE, policy, copies).sum(axis=0).max()))


def _packed(loads_E: Sequence[float], places: Sequence[int], num_ranks: int, size: int) -> LayerCopies:
    """The heaviest first, each on the least loaded rank with a free place, of nodes with the fewest of its places."""
    most = -(-sum(places) // num_ranks)
    experts: list[set[int]] = [set() for _ in range(num_ranks)]
    load, on_node = [0.0] * num_ranks, [[0] * len(places) for _ in range(num_ranks // size)]
    parts = [(loads_E[e] / count, e) for e, count in enumerate(places) for _ in range(count)]
    for tokens, expert in sorted(parts, key=lambda part: (-part[0], part[1])):
        free = [rank for rank in range(num_ranks) if len(experts[rank]) < most and expert not in experts[rank]]
        if free:
            rank = min(
                free, key=lambda rank: (on_node[rank // size][expert] if size < num_ranks else 0, load[rank], rank)
            )
            experts[rank].add(expert)
            load[rank] += tokens
            on_node[rank // size][expert] += 1
    return tuple(tuple(sorted(of)) for of in experts)


def ranks_placed(copies: LayerCopies, num_experts: int, num_ranks: int) -> list[list[int]]:
    """The ranks of each expert: those that name it, or its home where none does."""
    ranks: list[list[int]] = [[] for _ in range(num_experts)]
    for rank, experts in enumerate(copies):
        for expert in experts:
            ranks[expert].append(rank)
    home = ranks_of_experts(num_experts, num_ranks).tolist()
    return [of or [home[expert]] for expert, of in enumerate(ranks)]


def evenly_placed(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] of which all ranks of an expert have equal parts: EPLB's `LayerPlanner`."""
    return inside_nodes(counts_RE, policy._replace(node_ranks=0), copies)


def inside_nodes(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R]: a node's tokens go in equal parts to the ranks of the expert there, or to all where it has none:
    LAER's `LayerPlanner`."""
    num_ranks, num_experts = counts_RE.shape
    size = policy.node_ranks or num_ranks
    of_nodes_NE = counts_RE.reshape(num_ranks // size, size, num_experts).sum(axis=1)
    quotas_ER = np.zeros((num_experts, num_ranks), dtype=np.int64)
    for expert, ranks in enumerate(ranks_placed(copies, num_experts, num_ranks)):
        for node, tokens in enumerate(of_nodes_NE[:, expert].tolist()):
            near = [rank for rank in ranks if rank // size == node] or ranks
            each, more = divmod(tokens, len(near))
            for place, rank in enumerate(near):
                quotas_ER[expert, rank] += each + (place < more)
    return quotas_ER
