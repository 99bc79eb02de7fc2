"""What HiGHS says of dealing sequences to replicas (PuLP)."""

import numpy as np
import pulp


def least_end_s(seconds, fixed_s, kind_of, *, whole):
    """The least end of the last replica: of whole sequences, or of fractions of them."""
    problem, end_s = pulp.LpProblem("dealing", pulp.LpMinimize), pulp.LpVariable("end", 0)
    problem += end_s
    # Fractions need not tell replicas of a kind apart.
    kinds = np.asarray(kind_of) if whole else np.unique(kind_of)
    counts = np.ones(len(kinds)) if whole else np.bincount(kind_of)
    loads = [[] for _ in kinds]
    for s, row in enumerate(seconds):
        parts = []
        for r, kind in enumerate(kinds):
            if np.isfinite(row[kind]):
                parts.append(pulp.LpVariable(f"x{s}_{r}", 0, 1, cat="Integer" if whole else "Continuous"))
                loads[r].append(float(row[kind]) * parts[-1])
        problem += pulp.lpSum(parts) == 1
    for load, count, kind in zip(loads, counts, kinds, strict=True):
        problem += pulp.lpSum(load) * (1.0 / count) + float(fixed_s[kind]) <= end_s
    problem.solve(pulp.HiGHS(msg=False, gapRel=0))
    return end_s.value()
