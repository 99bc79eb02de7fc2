"""Copies of experts: plans whose quotas are drawn in every layer of every pass, and the planner that draws them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from evenload.core.aliases import Ints
from evenload.core.experts.quotas import at_home
from evenload.core.plan.expert_policy import ExpertPolicy, LayerCopies
from evenload.core.plan.step_plan import StepPlan
from evenload.core.registry import layer_planner

NUM_EXPERTS, TOPK = 4, 2
"""Of the models that are tested."""


def drawn_quotas(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Any quotas at all, from the counts alone: each expert's tokens on a drawn set of ranks, its home often not among
    them; now and then all of them on one."""
    num_ranks, num_experts = counts_RE.shape
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(counts_RE).tobytes()))
    shares_ER = rng.dirichlet(np.full(num_ranks, rng.choice([0.1, 1.0])), size=num_experts)
    if rng.random() < 0.1:
        shares_ER[:] = np.eye(num_ranks)[rng.integers(num_ranks)]
    return np.stack([rng.multinomial(n, p) for n, p in zip(counts_RE.sum(axis=0), shares_ER, strict=True)])


def quotas_now_and_then(counts_RE: Ints, *more: Any) -> Ints:
    """`drawn_quotas` three times of four, else every expert at home."""
    drawn = zlib.crc32(counts_RE.astype("int64").tobytes()) % 4
    return (drawn_quotas if drawn else at_home)(counts_RE, *more)


def with_drawn_copies(plan: StepPlan, number: int, *, once: bool = True) -> StepPlan:
    """The plan, every second one with quotas that are drawn; half of those with copies that are fetched again for the
    backward and, with ``once``, with tokens that go once to each rank."""
    if plan.limits.in_step == 1 or number % 2 == 0:
        return plan
    policy = ExpertPolicy("drawn", slots=NUM_EXPERTS)
    if number % 4 != 1:
        policy = policy._replace(keep=False, **({"node_ranks": 1, "once_topk": TOPK} if once else {}))
    return plan.revised(experts=policy)


def layer_planner_of(name: str) -> Any:
    """The registry's, which knows no planner ``drawn``."""
    return quotas_now_and_then if name == "drawn" else layer_planner(name)
