"""A batch of samples that begin alike, next to its plan of rows: each prompt computed once. All is predicted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.aliases import Ints
from ...core.errors import EvenloadError
from ...core.plan.step_plan import Lengths
from ...core.planning.chain import PlanChain
from ...core.planning.judge import outcome_of
from ...core.planning.trees import branches_of, plan_trees
from ...core.simulate.step import after_passes_s

_NEEDS = (
    "they need plugins.packing with trees and without padded, equal_size and group_size, samples within its "
    "max_tokens, and neither plugins.mesh nor parallel.cp"
)


class TreesOfStep(NamedTuple):
    """What a batch comes to as trees."""

    rows_tokens: int
    distinct_tokens: int
    """Each prompt once."""
    limit_s: float
    """A step of these alone, spread evenly over the ranks, without launches."""
    tokens: int | None = None
    """That the plan computes: a prompt more than once where that evens ranks."""
    step_s: float | None = None
    imbalance: float | None = None
    why_not: str | None = None
    """Why there is no plan."""


def planned_trees(chain: PlanChain, batch: Lengths, groups: Ints, trunks: Ints) -> TreesOfStep:
    """The trees of a batch whose samples begin with so many tokens as all of their group do, integers [S] each."""
    first = np.unique(np.stack([groups, trunks]), axis=1, return_index=True)[1]
    before = trunks.copy()
    before[first] = 0
    work_s = chain.context.costs.both.seconds(batch - before, before).sum()
    limit_s = float(work_s) / chain.limits.num_ranks + after_passes_s(chain.context)
    rows = TreesOfStep(int(batch.sum()), int((batch - before).sum()), limit_s)
    branches = branches_of(chain, batch, groups, trunks)
    if chain.caps.equal_size or len(chain.groups_in(batch)) or not branches:
        return rows._replace(why_not=_NEEDS)
    try:
        plan = plan_trees(chain, branches)
    except EvenloadError as error:
        return rows._replace(why_not=f"{error.what} ({error.found})")
    outcome = outcome_of(plan, chain.context)
    return rows._replace(tokens=plan.num_tokens, step_s=outcome.step_s, imbalance=outcome.imbalance)
