"""Set-ups without pipelines, on which sequences are shared: static context parallelism, and the mesh plugin.

Every sharing is timed by `core.costs.attention_comm`. Systems that are not evenload send gradients of keys and values
as wide as these; evenload's runtime sends them in float32, and is timed so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from evenload.benchmarks.chains import with_traffic
from evenload.benchmarks.published.common import Degrees, Machines, Way
from evenload.core.plan.step_plan import CpComm, StepPlan
from evenload.core.planning.chain import PlanChain
from evenload.core.registry import get
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.config import MeshConfig


@dataclass(frozen=True)
class Plane:
    """A model on ranks that a plan may share out."""

    model: str
    ranks: int
    cluster: str
    tokens: int
    """That a rank holds in a micro-batch."""
    intra_bytes_per_s: float = 0.0
    """In place of the cluster's; 0: that."""
    inter_bytes_per_s: float = 0.0
    memory_bytes: float = 0.0
    """Where a paper's ``tokens`` are taken, whether they fit is not asked: a number that is large enough."""

    @cache  # noqa: B019  # a script's settings live as long as the script
    def static(self, degree: int, packing: str = "in_order") -> PlanChain:
        """Whole sequences packed on lanes of ``degree`` ranks: static context parallelism."""
        machines = Machines(self.model, self.ranks, self.cluster)
        return self._linked(machines.chain(Way(packing, Degrees(cp=degree), self.tokens)))

    @cache  # noqa: B019
    def mesh(self, planner: str = "", **words: Any) -> PlanChain:
        """The mesh plugin with these settings, or one of its baselines."""
        machines = Machines(self.model, self.ranks, self.cluster)
        chain = self._linked(machines.chain(Way("evenload", Degrees(), self.tokens)))
        config = MeshConfig(enabled=True, max_tokens=self.tokens, **words)
        return replace(chain, links=((get("mesh"), config),), instead=planner)

    def _linked(self, chain: PlanChain) -> PlanChain:
        cluster = chain.context.cluster
        stated = {"intra": self.intra_bytes_per_s, "inter": self.inter_bytes_per_s}
        links = {
            name: getattr(cluster, name).model_copy(update={"bytes_per_s": rate})
            for name, rate in stated.items()
            if rate
        }
        memory = {"memory_bytes": self.memory_bytes or cluster.memory_bytes}
        return replace(chain, context=replace(chain.context, cluster=cluster.model_copy(update=links | memory)))


def theirs(chain: PlanChain) -> PlanChain:
    """The same as a system that is not evenload."""
    return with_traffic(chain, kv_grad_frac=1.0)


def shared_by(plan: StepPlan, cp_comm: CpComm, *, routed: bool = False) -> StepPlan:
    """The same plan with another way to share attention."""
    micro_batches = tuple(
        m._replace(cp_comm=cp_comm, routed=routed) if len(m.ranks) > 1 else m for m in plan.micro_batches
    )
    return replace(plan, micro_batches=micro_batches)


def seconds_of(plan: StepPlan, chain: PlanChain) -> float:
    return simulate(plan, chain.context, record=False).step_s


def described(plan: StepPlan, chain: PlanChain) -> dict[str, Any]:
    """Seconds of a step, and how busy its ranks are in compute alone: the busiest over the mean."""
    busy = np.zeros(plan.limits.num_ranks)
    for m in plan.micro_batches:
        for own in chain.context.costs.rank_s(m):
            busy[list(m.ranks)] += own
    return {"step_s": seconds_of(plan, chain), "imbalance": float(busy.max() / busy.mean())}
