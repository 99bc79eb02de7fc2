"""Static context parallelism: every micro-batch on a CP group of ``parallel.cp`` neighbouring ranks.

This is what trainers do by themselves, and what a planner that places work on single ranks amounts to there: a group is
planned as one rank that computes cp times as fast and holds cp times as many tokens, then each of its ranks gets its
share. What the sharing costs is said in `costs.exposed`; all-to-alls (to experts and back, too), which nothing hides
and which grow with the tokens alone, count as linear work of a group. One degree for all; `mesh` chooses one for each.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from ..costs.context import PlanningContext
from ..costs.costs import Costs, PassCost
from ..machine.layout import Layout
from ..plan.limits import Limits
from ..plan.order import PASS_KINDS
from ..plan.step_plan import MicroBatch, Op, StepPlan
from .terms import Terms

OfTerms = TypeVar("OfTerms", bound=Terms)


def fold_cp(limits: Limits, context: PlanningContext) -> tuple[Limits, PlanningContext]:
    """Limits and context of a plane whose ranks are the CP groups."""
    layout = context.layout
    max_tokens, memory = limits.max_tokens * layout.cp, limits.memory.folded(layout)
    in_step = _groups_in_step(limits.in_step, layout)
    folded = replace(limits, num_ranks=layout.dp, max_tokens=max_tokens, memory=memory, in_step=in_step)
    ranks = replace(layout, cp=1, ep=_groups_in_step(layout.ep, layout))
    # Each rank of a group hands over its own share, on the link of its own place.
    state_bytes = context.traffic.state_bytes_per_token / layout.cp
    traffic = replace(context.traffic, state_bytes_per_token=state_bytes, expert_bytes_per_token=0.0)
    # Tensor-parallel ranks of one node stay on one.
    node = context.cluster.ranks_per_node
    nodes = context.cluster.model_copy(update={"ranks_per_node": max(min(layout.tp, node), node // layout.cp)})
    return folded, replace(context, costs=_shared(context), layout=ranks, cluster=nodes, traffic=traffic)


def _groups_in_step(in_step: int, layout: Layout) -> int:
    """CP groups that run every pass together where so many neighbouring ranks do."""
    inside = layout.cp % in_step == 0
    return 1 if inside else in_step // layout.cp if in_step % layout.cp == 0 else layout.dp


def unfold_cp(plan: StepPlan, limits: Limits, cp: int) -> StepPlan:
    """The plan of CP groups as one of ranks, under their own limits; the token cap is the plan's on a rank."""
    max_tokens, held_bytes = -(-plan.limits.max_tokens // cp), plan.limits.max_activation_bytes
    own = replace(limits, max_tokens=max_tokens, max_activation_bytes=held_bytes)
    places = {kind: _places(plan.passes(kind), cp) for kind in PASS_KINDS}
    order = tuple(tuple(Op(op.kind, i) for op in ops for i in places[op.kind][op.micro_batch]) for ops in plan.order)
    return replace(
        plan,
        micro_batches=_spread(plan.micro_batches, cp),
        backward=_spread(plan.backward, cp),
        replayed=tuple(i for j in plan.replayed for i in places["B"][j]),
        order=order,
        recompute=tuple(tuple(n for i, n in enumerate(row) for _ in places["F"][i]) for row in plan.recompute),
        offload=tuple(share for i, share in enumerate(plan.offload) for _ in places["F"][i]),
        limits=own,
    )


def _spread(micro_batches: tuple[MicroBatch, ...], cp: int) -> tuple[MicroBatch, ...]:
    return tuple(one for m in micro_batches for one in _on_cp_group(m, cp))


def _on_cp_group(micro_batch: MicroBatch, cp: int) -> tuple[MicroBatch, ...]:
    """On the ranks of the group: padded until each rank has a token; a dummy becomes one for each rank."""
    ranks = tuple(rank * cp + i for rank in micro_batch.ranks for i in range(cp))
    if not micro_batch.slices:
        return tuple(micro_batch._replace(ranks=(rank,)) for rank in ranks)
    pad_to, count = micro_batch.pad_to, len(micro_batch.slices)
    if micro_batch.num_padded_tokens < cp:
        pad_to = max(-(-cp // count), *(s.length for s in micro_batch.slices))
    return (micro_batch._replace(ranks=ranks, pad_to=pad_to),)


def _places(micro_batches: tuple[MicroBatch, ...], cp: int) -> list[range]:
    ends = list(accumulate(1 if m.slices else cp for m in micro_batches))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _shared(context: PlanningContext) -> Costs:
    costs, moves, share = context.costs, _all_to_alls(context), 1.0 / context.layout.cp
    forward, backward = (cost.scaled(share, 1.0).plus(moves) for cost in (costs.forward, costs.backward))
    memory = costs.memory.folded(context.layout)
    ep = _groups_in_step(context.layout.ep, context.layout)
    return costs.model_copy(update={"forward": forward, "backward": backward, "memory": memory, "ep": ep})


def _all_to_alls(context: PlanningContext) -> PassCost:
    """What the ranks of a group exchange in a pass of either direction: heads where they share these, and tokens that
    go to experts and back."""
    traffic, layout = context.traffic, context.layout
    moves = PassCost(token_s=0.0)
    if traffic.cp_comm == "all_to_all":
        token_bytes = 2 * traffic.query_bytes_per_token + traffic.kv_bytes_per_token
        moves = moves.plus(_all_to_all(context, layout.cp, token_bytes / layout.cp, 1))
    if layout.ep > 1 and traffic.expert_bytes_per_token:
        token_bytes = 2 * traffic.expert_bytes_per_token / layout.cp
        moves = moves.plus(_all_to_all(context, layout.ep, token_bytes, 2 * max(1, traffic.moe_layers)))
    return moves


def _all_to_all(context: PlanningContext, ranks: int, token_bytes: float, calls: int) -> PassCost:
    peers = context.layout.world_ranks(0, range(ranks))
    launch_s = context.cluster.all_to_all_s(0.0, peers, calls)
    return PassCost(launch_s=launch_s, token_s=context.cluster.all_to_all_s(token_bytes, peers, calls) - launch_s)


def folded(terms: OfTerms) -> OfTerms:
    """The terms of a plane whose ranks are the groups of static context parallelism."""
    limits, context = fold_cp(terms.limits, terms.context)
    links = tuple((plugin, config.folded(terms.cp)) for plugin, config in terms.links)
    return replace(terms, links=links, limits=limits, context=context)
