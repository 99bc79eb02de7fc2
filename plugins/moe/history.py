"""Copies chosen from the loads of earlier steps, before a router has chosen: for layout and reroute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...core.costs.context import ExpertContext
from ...core.experts.quotas import copies_of
from ...core.plan.expert_policy import ExpertPolicy, LayerCopies
from .clone import clone

ChooseCopies = Callable[[Sequence[float], int, ExpertPolicy], LayerCopies]
"""Of one layer: loads of its experts, ranks of a group and the policy, to copies."""

_TOTAL = 1 << 30
"""Loads are read as so many tokens of all experts together."""


def choose_copies(loads_E: Sequence[float], num_ranks: int, policy: ExpertPolicy) -> LayerCopies:
    """The copies that exact loads would need, were the next step's loads these ones.

    They are fetched a layer ahead, behind computation, so that small ones cost nothing either.
    """
    counts_RE = np.zeros((num_ranks, len(loads_E)), dtype=np.int64)
    counts_RE[0] = np.rint(np.array(loads_E) * (_TOTAL / max(sum(loads_E), 1e-9)))
    return copies_of(clone(counts_RE, policy._replace(least_tokens=0), ()))


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
