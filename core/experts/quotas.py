"""Quotas: how many tokens of each expert every rank of a group computes in one pass of one layer, and what they keep.

A planner of layers is a pure function of what all ranks of the group have gathered, so that every rank comes to the
same integers. `check_quotas` holds each answer to the laws before a token moves.

Shape legend: R = ranks of a group, E = experts of a layer; expert e has its home on rank e // (E / R).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..aliases import Ints
from ..errors import PlanError
from ..plan.expert_policy import ExpertPolicy, LayerCopies

LayerPlanner = Callable[[Ints, ExpertPolicy, LayerCopies], Ints]
"""``planner(counts, policy, copies)``: tokens of each rank for each expert [R, E], the policy of the plan and the
copies that are there before the counts are, to quotas [E, R]: tokens of each expert that each rank computes."""


def ranks_of_experts(num_experts: int, num_ranks: int) -> Ints:
    """The home of each expert [E]."""
    return np.arange(num_experts) // (num_experts // num_ranks)


def at_home(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R] under which every expert's tokens run at its home: a `LayerPlanner`."""
    num_ranks, num_experts = counts_RE.shape
    quotas_ER = np.zeros((num_experts, num_ranks), dtype=np.int64)
    quotas_ER[np.arange(num_experts), ranks_of_experts(num_experts, num_ranks)] = counts_RE.sum(axis=0)
    return quotas_ER


def copies_of(quotas_ER: Ints) -> LayerCopies:
    """The experts that each rank needs a copy of, ascending."""
    away_ER = np.array(quotas_ER) > 0
    num_experts, num_ranks = away_ER.shape
    away_ER[np.arange(num_experts), ranks_of_experts(num_experts, num_ranks)] = False
    ranks, experts = away_ER.T.nonzero()
    ends, row = ranks.searchsorted(np.arange(num_ranks), "right").tolist(), experts.tolist()
    return tuple(tuple(row[start:end]) for start, end in zip([0, *ends], ends, strict=False))


def imbalance_of(quotas_ER: Ints) -> float:
    """Tokens of the busiest rank over those of the mean rank; 1 where there are none."""
    loads_R = quotas_ER.sum(axis=0)
    return float(loads_R.max() / loads_R.mean()) if loads_R.any() else 1.0


def check_quotas(quotas_ER: Ints, counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """The quotas, if they keep every law; raise `PlanError` with the first broken one otherwise.

    Each token of each expert is computed once; no rank has more copies than slots; of experts whose copies are chosen
    before the counts are known, no other is used.
    """
    num_ranks, num_experts = counts_RE.shape
    do = f"correct the planner of layers '{policy.planner}'"
    if quotas_ER.shape != (num_experts, num_ranks) or (quotas_ER < 0).any():
        raise PlanError(
            "quotas are not counts of tokens by expert and rank", f"shape {quotas_ER.shape}, {num_experts} experts", do
        )
    wanted_E, served_E = counts_RE.sum(axis=0), quotas_ER.sum(axis=1)
    if (wrong := np.flatnonzero(wanted_E != served_E)).size:
        expert = int(wrong[0])
        detail = f"expert {expert}: {wanted_E[expert]} tokens, {served_E[expert]} in quotas"
        raise PlanError("quotas lose tokens of an expert, or repeat them", detail, do)
    for rank, experts in enumerate(copies_of(quotas_ER)):
        if len(experts) > policy.slots:
            raise PlanError("a rank has more copies of experts than slots", f"rank {rank}: {len(experts)}", do)
        if copies and (other := sorted(set(experts) - set(copies[rank]))):
            raise PlanError("a rank is to compute an expert that it has no copy of", f"rank {rank}: {other[0]}", do)
    return quotas_ER
