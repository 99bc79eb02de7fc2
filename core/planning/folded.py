"""Chains under static context parallelism: planned as if each CP group were one rank, see `static_cp`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ..balance.step_bound import passes_bound_s
from ..errors import EvenloadError
from ..plan.step_plan import Lengths, StepPlan
from .judge import outcome_of
from .static_cp import fold_cp, unfold_cp

if TYPE_CHECKING:
    from .chain import PlanChain


def folded(chain: PlanChain) -> PlanChain:
    """The chain of a plane whose ranks are the groups of static context parallelism."""
    limits, context = fold_cp(chain.limits, chain.context)
    links = tuple((plugin, config.folded(chain.cp)) for plugin, config in chain.links)
    return replace(chain, links=links, limits=limits, context=context)


def best_folded(chain: PlanChain, batch: Lengths) -> StepPlan:
    """Folded plans know compute alone; so a plan without cuts, whose prefixes travel once, is simulated beside. In
    a CP group every slice moves the keys and values of its whole prefix, which compute may not hide."""
    groups = folded(chain)
    *_, own = groups.chained(batch)
    plans = [chain.under_caps(unfold_cp(own, chain.limits, chain.cp))]
    if plans[0].cut:
        uncut = replace(groups, links=tuple((plugin, config.uncut()) for plugin, config in groups.links))
        with suppress(EvenloadError):  # a sequence that must be cut
            *_, own = uncut.chained(batch)
            plans.append(chain.under_caps(unfold_cp(own, chain.limits, chain.cp)))
    best = min(plans, key=lambda plan: outcome_of(plan, chain.context).step_s)
    return best.revised(bound_s=_bound_s(groups, batch))


def _bound_s(groups: PlanChain, batch: Lengths) -> float:
    """No plan of a chain whose ranks are CP groups ends its passes before [s]; 0 where all-to-alls, which are in its
    costs, would be taken for the head's work."""
    moves = groups.context.traffic.cp_comm == "all_to_all" or groups.context.layout.ep > 1
    if not groups.links or (moves and groups.limits.num_stages > 1):
        return 0.0
    return passes_bound_s(batch, groups.caps, groups.context, orders=groups.orders)
