"""Copies chosen from the loads of earlier steps, before a router has chosen: for layout and reroute.

Each copy goes to the expert with the highest load a place, as DeepSeek's EPLB has it, but homes keep their experts: the
heaviest parts come first, each to the rank with the least to do so far. Copies of the exact planner's takers are fewer,
but fit the loads of one step alone: one step later they leave more (benchmarks/results/experts.md).

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from ...core.costs.context import ExpertContext
from ...core.plan.expert_policy import ExpertPolicy, LayerCopies

SLOTS_AHEAD = 2
"""Of copies that are fetched whatever the counts will be, unless the recipe says how many."""
ChooseCopies = Callable[[Sequence[float], int, ExpertPolicy], LayerCopies]
"""Of one layer: loads of its experts, ranks of a group and the policy, to copies."""


def choose_copies(loads_E: Sequence[float], num_ranks: int, policy: ExpertPolicy) -> LayerCopies:
    """Copies that fill the slots and even loads like these ones if tokens are divided evenly over the places."""
    places, own = places_by_load(loads_E, num_ranks, policy.slots), len(loads_E) // num_ranks
    parts = [load / count for load, count in zip(loads_E, places, strict=True)]
    tokens = [sum(parts[first : first + own]) for first in range(0, len(parts), own)]
    copies: list[set[int]] = [set() for _ in range(num_ranks)]
    spread = [expert for expert, count in enumerate(places) for _ in range(count - 1)]
    for expert in sorted(spread, key=lambda expert: -parts[expert]):
        able = [r for r, of in enumerate(copies) if len(of) < policy.slots and expert not in of and r != expert // own]
        if able:
            rank = min(able, key=tokens.__getitem__)
            copies[rank].add(expert)
            tokens[rank] += parts[expert]
    return tuple(tuple(sorted(of)) for of in copies)


def places_by_load(loads_E: Sequence[float], num_ranks: int, slots: int) -> list[int]:
    """On how many ranks each expert is, if the busiest one a place gets each slot."""
    places = [1] * len(loads_E)
    heap = [(-load, expert) for expert, load in enumerate(loads_E)] if num_ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(num_ranks * slots):
        if not heap:
            break
        _, expert = heapq.heappop(heap)
        places[expert] += 1
        if places[expert] < num_ranks:
            heapq.heappush(heap, (-loads_E[expert] / places[expert], expert))
    return places


def of_layers(
    experts: ExpertContext, num_ranks: int, policy: ExpertPolicy, choose: ChooseCopies = choose_copies
) -> tuple[LayerCopies, ...]:
    """For each layer of the model its copies; empty where no loads are known."""
    if not experts.loads:
        return ()
    copies: list[LayerCopies] = [()] * experts.num_layers
    for layer, loads_E in zip(experts.layers, experts.loads, strict=True):
        copies[layer] = choose(loads_E, num_ranks, policy)
    return tuple(copies)
