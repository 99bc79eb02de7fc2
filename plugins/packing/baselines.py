"""What others do with the same batch, as plans: the yardsticks of `evenload plan` and `evenload bench`.

whole           whole sequences, longest first onto the cheapest rank, then onto its cheapest micro-batch: balanced
                packing of samples without cutting any (Hydraulis's two stages; `whole`)
chunks          sequences to ranks by cost; on each, long ones in chunks of ``max_tokens`` tokens, a micro-batch each,
                the others best-fit; early chunks are replayed where ``activation_gib`` asks for it (ChunkFlow, arXiv
                2503.02356)
in_order        pack in the order of the batch up to the cap, deal the packs out in turn
dp_balanced     the same, but where packs do not go round, the last sequences of the last packs become packs of their
                own (Megatron-Core's DpBalancedScheduler, core/datasets/data_schedule.py on main, which balances counts)
best_fit        best-fit-decreasing bins over the whole batch, dealt out in turn (TRL's packing_strategy "bfd")
group_by_length sorted by length, equally many padded rows in each micro-batch, dealt out in turn (what Transformers'
                train_sampling_strategy "group_by_length" does, here inside the batch that it would otherwise change)
token_budget    sorted by length, micro-batches of equal padded tokens, dealt out in turn (online dynamic batching,
                arXiv 2606.19989, inside the batch; so many as are predicted to take least)
karmarkar_karp  sequences to ranks, then to micro-batches, by largest differencing on predicted cost (verl's
                seqlen_balancing.get_seqlen_balanced_partitions and rearrange_micro_batches)

Equal numbers of packs on every rank, by halving the widest, are this module's addition to in_order and best_fit:
stronger baselines than packs dealt as they come. None of them changes the batch, and none but ``chunks`` cuts a
sequence: where one is longer than ``max_tokens`` they get a cap that holds it. All are run by the same code as
evenload's own plans. Where samples stay together (``group_size``) or ranks get equal counts (``equal_size``), whole,
chunks and karmarkar_karp keep to it, the latter as verl's partitions of equal size do; the others do not. Where
sequences are rows of padded micro-batches, all pad what they combine, under a cap that holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ...core.balance.bound import lower_bound_s
from ...core.balance.partition import best_fit_decreasing, karmarkar_karp, members
from ...core.balance.partition import in_order as in_order_bins
from ...core.costs.context import PlanningContext
from ...core.plan.limits import Limits
from ...core.plan.step_plan import StepPlan
from ...core.registry import Baseline, Planner, Sizes
from .candidates import chunked, uncut
from .candidates import whole as whole_plan
from .config import PackingConfig
from .padded import group_by_length, token_budget, widened
from .replay import ReplayCapError, fit_memory
from .whole import units_of

Packs = list[list[list[int]]]


def whole(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    limits = _holding_longest(incoming, config)
    bound_s = lower_bound_s(incoming.lengths, limits, context.costs, context.head_frac)
    return whole_plan(incoming, limits, context.costs, bound_s, "whole")


def chunks(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    limits = config.capped(incoming.limits)
    if limits.groups_in_micro_batch or limits.padded:
        return whole(incoming, context, config)
    if limits.whole_sequences:
        limits = replace(limits, max_tokens=_holding_longest(incoming, config).max_tokens)
    plan = replace(chunked(incoming, limits, context.costs, config.block_tokens), made_by="chunks")
    with suppress(ReplayCapError):
        plan = fit_memory(plan)
    return plan


def in_order(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    limits = _holding_longest(incoming, config)
    packs = in_order_bins(incoming.lengths.tolist(), limits.max_tokens)
    return uncut(incoming, limits, _deal(packs, limits.num_ranks), "in_order")


def dp_balanced(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    limits = _holding_longest(incoming, config)
    packs = in_order_bins(incoming.lengths.tolist(), limits.max_tokens)
    last = len(packs) - 1
    while len(packs) % limits.num_ranks and last >= 0:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
        else:
            last -= 1
    return uncut(incoming, limits, [packs[rank :: limits.num_ranks] for rank in range(limits.num_ranks)], "dp_balanced")


def best_fit(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    limits = _holding_longest(incoming, config)
    packs = best_fit_decreasing(incoming.lengths, limits.max_tokens)
    return uncut(incoming, limits, _deal(packs, limits.num_ranks), "best_fit")


def differencing(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
    lengths, limits = incoming.lengths, _holding_longest(incoming, config)
    seconds, cap = context.costs.sequence_s(lengths), limits.max_tokens
    units = units_of(incoming, context.costs)
    inside = members(units.of, len(units.tokens))
    packs: Packs = []
    for chosen in karmarkar_karp(units.seconds.tolist(), limits.num_ranks, equal_size=limits.equal_size):
        items = [i for unit in chosen for i in inside[unit]]
        tokens = [int(lengths[i]) for i in items]
        for count in range(max(1, -(-sum(tokens) // cap)), len(items) + 1):
            bins = karmarkar_karp([float(seconds[i]) for i in items], count)
            if all(sum(tokens[i] for i in b) <= cap for b in bins):
                packs.append([[items[i] for i in b] for b in bins])
                break
        else:
            packs.append([])
    return uncut(incoming, limits, packs, "karmarkar_karp")


def _padding(baseline: Planner) -> Planner:
    def planned(incoming: StepPlan, context: PlanningContext, config: PackingConfig) -> StepPlan:
        plan = baseline(incoming, context, config)
        return widened(plan) if plan.limits.padded else plan

    return planned


def _in_rows(of_rows: Callable[[StepPlan, PlanningContext, Limits], StepPlan]) -> Planner:
    return lambda incoming, context, config: of_rows(incoming, context, _holding_longest(incoming, config))


BASELINES = {
    "whole": Baseline(_padding(whole), "whole"),
    "chunks": Baseline(_padding(chunks), "on one rank"),
    "in_order": Baseline(_padding(in_order), "whole"),
    # What `in_order` packs more evenly is tried in small batches alone.
    "dp_balanced": Baseline(_padding(dp_balanced), "whole", Sizes(shown=1 << 40, tried=1 << 14)),
    "best_fit": Baseline(_padding(best_fit), "whole"),
    "karmarkar_karp": Baseline(_padding(differencing), "whole", Sizes(shown=1 << 22, tried=1 << 17)),
    "group_by_length": Baseline(_in_rows(group_by_length), "whole", padded=True),
    "token_budget": Baseline(_in_rows(token_budget), "whole", padded=True),
}


def _deal(packs: list[list[int]], num_ranks: int) -> Packs:
    """Packs to ranks in turn. The largest that can be halved are, until every rank has the same number."""
    packs = [list(p) for p in packs]
    while len(packs) % num_ranks:
        widest = max(range(len(packs)), key=lambda i: len(packs[i]))
        if len(packs[widest]) < 2:
            break
        middle = len(packs[widest]) // 2
        packs[widest : widest + 1] = [packs[widest][:middle], packs[widest][middle:]]
    return [packs[rank::num_ranks] for rank in range(num_ranks)]


def _holding_longest(incoming: StepPlan, config: PackingConfig) -> Limits:
    """The host's limits with the section's token cap, or one that holds the longest sequence."""
    cap = max(config.capped(incoming.limits).max_tokens, int(incoming.lengths.max(initial=0)))
    return replace(incoming.limits, max_tokens=cap)
