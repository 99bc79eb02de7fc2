"""Other people's answers to where experts run, from their papers and documents, for comparison.

static     every token goes to its expert's home
eplb       more copies for busier experts, packed over the ranks by the loads of earlier steps; tokens evenly (DeepSeek)
laer       the same idea with copies spread over nodes, and tokens kept inside them (LAER-MoE, arXiv 2602.11686)
lp         eplb's copies, and exact counts divided over them by a linear program (LPLB; MicroMoE, arXiv 2511.16947)
ultraep    copies from exact counts: quotas under the least threshold that a greedy rule keeps (arXiv 2606.04101)
moonep     copies from exact counts: the roomiest rank is filled whole by the most loaded one (Moonshot's MoonEP)

Where the loads of earlier steps are unknown, experts stay at home. Unless the recipe says how many slots there are,
those that choose from counts have as many as experts at home, those that choose from loads two, as `reroute` has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....core.costs.context import PlanningContext
from ....core.experts.quotas import LayerPlanner
from ....core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from ....core.plan.step_plan import StepPlan
from ....core.simulate.experts import node_ranks_of
from ..config import MoeConfig
from ..history import SLOTS_AHEAD, ChooseCopies, of_layers
from .linear import by_linear_program, copies_for_program
from .placed import eplb_copies, evenly_placed, inside_nodes, laer_copies
from .roomiest import roomiest_first
from .threshold import under_a_threshold

Baseline = Callable[[StepPlan, PlanningContext, Any], StepPlan]


def static(incoming: StepPlan, context: PlanningContext, config: Any) -> StepPlan:
    """Expert parallelism as the trainer has it: every token goes to its expert's home."""
    return incoming.revised(experts=EXPERTS_AT_HOME)


def _by_counts(planner: str) -> Baseline:
    """Copies of exact counts, in the slots of the recipe."""

    def plan(incoming: StepPlan, context: PlanningContext, config: MoeConfig) -> StepPlan:
        own = _own(context)
        return incoming.revised(experts=_policy(context, planner, own if config.slots is None else config.slots))

    return plan


def _by_loads(planner: str, choose: ChooseCopies) -> Baseline:
    """Copies of the loads of earlier steps. They name all experts of a rank, those at home among them that it keeps."""

    def plan(incoming: StepPlan, context: PlanningContext, config: MoeConfig) -> StepPlan:
        own, ep = _own(context), context.layout.ep
        policy = _policy(context, planner, min(own, SLOTS_AHEAD) if config.slots is None else config.slots)
        if context.experts is None or not context.experts.loads or policy == EXPERTS_AT_HOME:
            return incoming.revised(experts=EXPERTS_AT_HOME)
        copies = of_layers(context.experts, ep, policy, choose)
        return incoming.revised(experts=policy._replace(copies=copies, slots=policy.slots + own))

    return plan


def _own(context: PlanningContext) -> int:
    return context.experts.num_experts // context.layout.ep if context.experts else 0


def _policy(context: PlanningContext, planner: str, slots: int) -> ExpertPolicy:
    if context.experts is None or context.layout.ep == 1:
        return EXPERTS_AT_HOME
    return ExpertPolicy(planner, slots, node_ranks=node_ranks_of(context))


BASELINES: Mapping[str, Baseline] = {
    "static": static,
    "eplb": _by_loads("eplb", eplb_copies),
    "laer": _by_loads("laer", laer_copies),
    "lp": _by_loads("lp", copies_for_program),
    "ultraep": _by_counts("ultraep"),
    "moonep": _by_counts("moonep"),
}
LAYERS: Mapping[str, LayerPlanner] = {
    "eplb": evenly_placed,
    "laer": inside_nodes,
    "lp": by_linear_program,
    "ultraep": under_a_threshold,
    "moonep": roomiest_first,
}
FROM_HISTORY = frozenset({"eplb", "laer", "lp"})
"""Baselines that choose copies from the loads of earlier steps."""
