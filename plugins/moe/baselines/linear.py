"""LPLB and MicroMoE: exact counts divided over copies that are there by a linear program, in every layer.

    minimize t   with   sum over ranks of x_er = tokens of e,   sum over experts of x_er <= t,   x >= 0

LPLB solves it on one multiprocessor of a GPU, MicroMoE (arXiv 2511.16947) on the CPU; here HiGHS does. Tokens are
whole: what rounding down leaves goes to the rank with the fewest so far.

Shape legend: R = ranks of a group, E = experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....core.aliases import Ints
from ....core.errors import EvenloadError
from ....core.plan.expert_policy import ExpertPolicy, LayerCopies
from .placed import eplb_copies, ranks_placed


def copies_for_program(loads_E: Sequence[float], num_ranks: int, policy: ExpertPolicy) -> LayerCopies:
    """EPLB's, once it is sure that the solver is there. Raises EvenloadError where it is not installed."""
    _pulp()
    return eplb_copies(loads_E, num_ranks, policy)


def by_linear_program(counts_RE: Ints, policy: ExpertPolicy, copies: LayerCopies) -> Ints:
    """Quotas [E, R]: a `LayerPlanner`. Raises EvenloadError where the solver is not installed."""
    pulp = _pulp()
    num_ranks, num_experts = counts_RE.shape
    loads_E = counts_RE.sum(axis=0).tolist()
    ranks = ranks_placed(copies, num_experts, num_ranks)
    problem, most = pulp.LpProblem("quotas", pulp.LpMinimize), pulp.LpVariable("most", 0)
    tokens = {(e, r): pulp.LpVariable(f"tokens_{e}_{r}", 0) for e in range(num_experts) for r in ranks[e]}
    problem += most
    for expert, load in enumerate(loads_E):
        problem += pulp.lpSum(tokens[expert, rank] for rank in ranks[expert]) == load
    for rank in range(num_ranks):
        problem += pulp.lpSum(part for (_, r), part in tokens.items() if r == rank) <= most
    problem.solve(pulp.HiGHS(msg=False, threads=1))
    quotas_ER = np.zeros((num_experts, num_ranks), dtype=np.int64)
    for (expert, rank), part in tokens.items():
        quotas_ER[expert, rank] = max(0, int(part.value() + 1e-6))
    return _whole(quotas_ER, loads_E, ranks)


def _whole(quotas_ER: Ints, loads_E: list[int], ranks: list[list[int]]) -> Ints:
    """The quotas with each expert's missing tokens, which rounding took, or without those that it gave."""
    tokens_R = quotas_ER.sum(axis=0)
    for expert in np.flatnonzero(quotas_ER.sum(axis=1) != loads_E).tolist():
        for _ in range(abs(missing := loads_E[expert] - int(quotas_ER[expert].sum()))):
            of = ranks[expert] if missing > 0 else [rank for rank in ranks[expert] if quotas_ER[expert, rank]]
            rank = min(of, key=lambda rank: tokens_R[rank] * np.sign(missing))
            quotas_ER[expert, rank] += np.sign(missing)
            tokens_R[rank] += np.sign(missing)
    return quotas_ER


def _pulp() -> Any:
    try:
        import highspy  # noqa: F401
        import pulp
    except ImportError as error:
        do = "pip install PuLP highspy"
        raise EvenloadError("the baseline 'lp' solves linear programs", f"no module {error.name}", do) from error
    return pulp
