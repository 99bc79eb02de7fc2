"""Counts of tokens that routers might come to, drawn: even, one hot expert, one hot rank, idle experts, no token."""

from __future__ import annotations

import numpy as np
from evenload.core.aliases import Ints
from evenload.core.plan.expert_policy import ExpertPolicy
from hypothesis import strategies as st


@st.composite
def counts(draw: st.DrawFn, most_ranks: int = 12, most_own: int = 5) -> Ints:
    """Tokens of each rank for each expert [R, E]."""
    num_ranks, own = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_own))
    num_experts = num_ranks * own
    most = draw(st.sampled_from([1, 3, 50, 100_000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts_RE = rng.integers(0, most + 1, (num_ranks, num_experts))
    kind = draw(st.sampled_from(["even", "hot expert", "hot rank", "idle experts", "steep", "few tokens", "none"]))
    hot = draw(st.integers(0, num_experts - 1))
    if kind == "hot expert":
        counts_RE[:, hot] += most * num_experts
    elif kind == "hot rank":
        counts_RE *= np.arange(num_experts) // own == hot // own
    elif kind == "idle experts":
        counts_RE *= rng.random(num_experts) < 0.3
    elif kind == "steep":
        counts_RE = counts_RE * 4 ** rng.integers(0, 6, num_experts)
    elif kind == "few tokens":
        counts_RE[:] = 0
        counts_RE[0, hot] = draw(st.integers(1, num_ranks))
    elif kind == "none":
        counts_RE[:] = 0
    return counts_RE


@st.composite
def policies(draw: st.DrawFn, counts_RE: Ints) -> ExpertPolicy:
    """Any policy of a planner of layers for these counts."""
    num_ranks, num_experts = counts_RE.shape
    nodes = [0, *(size for size in range(1, num_ranks) if num_ranks % size == 0)]
    return ExpertPolicy(
        "drawn",
        slots=draw(st.integers(0, num_experts // num_ranks)),
        tolerance=draw(st.sampled_from([1.0, 1.01, 1.1, 1.5])),
        least_tokens=draw(st.sampled_from([0, 1, 7, 1000])),
        node_ranks=draw(st.sampled_from(nodes)),
    )
