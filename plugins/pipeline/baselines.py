"""What others do with the same batch on a pipeline, as plans.

whole_1f1b    every sequence a micro-batch, dealt to ranks in turn; the host's 1F1B (batch-level pipelining)
in_order      packs in the order of the batch up to the cap, dealt out in turn; the host's 1F1B
fixed_chunks  chunks of equally many tokens, short sequences packed best-fit (ChunkFlow, arXiv 2503.02356), in 1F1B over
              chunks (Seq1F1B, arXiv 2406.03488); the fastest of several sizes
algorithm_1   one mesh of equal time for all long sequences, tails next to short sequences, pipelines by the dynamic
              program with a flush between them, recomputation from the tied integer program (InfiniPipe, arXiv
              2509.21275, algorithms 1 and 2); the fastest of several meshes

All but ``algorithm_1`` recompute one number of layers for all chunks at all stages, the least that fits. Where a
sequence is longer than the cap, those that cut nothing get a cap that holds it. Ranks get sequences by cost in those
that cut. The orders are of `elastic`, without anything run ahead.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ...core.aliases import Ints
from ...core.balance.partition import in_order as in_order_bins
from ...core.balance.slicing import evenly, in_chunks
from ...core.costs.context import PlanningContext
from ...core.costs.costs import PassCost
from ...core.costs.memory import activation_budget_bytes, peaks_of_stage
from ...core.errors import EvenloadError
from ...core.plan.step_plan import Op, Slice, StepPlan
from ...core.planning.judge import Candidate, floor_s, judge
from ...core.planning.judge import best as best_candidate
from ...core.simulate.step import after_passes_s
from .checkpointing import fitted, keeping_all
from .chunks import Pack, assembled, dealt, least_s
from .clock import passes_s
from .config import PipelineConfig
from .elastic import ordered
from .groups import grouped
from .settings import breaks, limits_for, refuse_ranks_in_step

SIZES = 4
"""Chunk sizes that ``fixed_chunks`` tries: the cap, and half as many tokens each time."""
MESHES = (4, 8, 16, 32, 64)
"""Slices of the longest sequence that ``algorithm_1`` tries."""

PLAYED = 1 << 17
"""Passes of all stages in drafts of one baseline after which no further one is weighed as a candidate."""

Drafts = Callable[[StepPlan, PlanningContext, PipelineConfig], Iterator[StepPlan]]
Change = Callable[[StepPlan, PlanningContext, PipelineConfig], StepPlan]


@dataclass(frozen=True)
class Drafted:
    """Plans without an order, that need not fit; what orders one, and what makes it fit."""

    drafts: Drafts
    order: Change
    finish: Change

    def __call__(self, incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
        refuse_ranks_in_step(incoming.limits)
        drafts = list(self.drafts(incoming, context, config))
        fastest = self.best(drafts, context, config)
        if fastest is None or not fastest.fits:
            # A yardstick may hold more than the section's cap: what it holds is told next to its seconds.
            drafts = [one.revised(limits=replace(one.limits, max_activation_bytes=math.inf)) for one in drafts]
            fastest = self.best(drafts, context, config)
        return fastest.plan if fastest else self.order(drafts[0], context, config)

    def below(
        self, incoming: StepPlan, context: PlanningContext, config: PipelineConfig, bar_s: float
    ) -> StepPlan | None:
        """Its best plan under the section's caps and settings if that takes less than ``bar_s``; else perhaps None."""
        refuse_ranks_in_step(incoming.limits)
        cap = config.capped(incoming.limits).max_tokens
        drafts = (one for one in self.drafts(incoming, context, config) if one.limits.max_tokens <= cap)
        allowed = (one for one in drafts if not breaks(one, config))
        fastest = self.best(_first_ones(allowed), context, config, bar_s)
        return fastest.plan if fastest else None

    def best(
        self, drafts: Iterable[StepPlan], context: PlanningContext, config: PipelineConfig, bar_s: float = math.inf
    ) -> Candidate | None:
        """The fastest of its drafts that fits, ordered, and finished where it did not; the smallest where none fits.

        No order takes less than a draft's busiest rank by itself, and nothing that makes a plan fit makes it compute
        less. None where no draft takes less than ``bar_s``, or none can be made to fit.
        """
        if context.costs.recompute:
            bar_s = math.inf  # drafts know only of the recipe's recomputation until they are ordered
        rest_s = after_passes_s(context)
        near = (one for one in drafts if bar_s == math.inf or least_s(one, context) + rest_s < bar_s)
        hopeful = (one for one in near if bar_s == math.inf or floor_s(one, context) < bar_s)
        ordered = (keeping_all(self.order(one, context, config), context, config) for one in hopeful)
        playable = [one for one in ordered if bar_s == math.inf or passes_s(one, context) < bar_s]
        candidates: list[Candidate] = []
        for draft in sorted((judge(one, context) for one in playable), key=lambda one: one.step_s):
            if draft.step_s >= min([bar_s, *(one.step_s for one in candidates if one.fits)]):
                break
            with suppress(EvenloadError):
                candidates.append(draft if draft.fits else judge(self.finish(draft.plan, context, config), context))
        return best_candidate(candidates)


def _first_ones(drafts: Iterable[StepPlan]) -> Iterator[StepPlan]:
    """The first draft, and further ones while all have no more than `PLAYED` passes together."""
    passes = 0
    for draft in drafts:
        passes += 2 * len(draft.micro_batches) * draft.limits.num_stages
        if passes > PLAYED and passes > 2 * len(draft.micro_batches) * draft.limits.num_stages:
            return
        yield draft


def whole_1f1b(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> Iterator[StepPlan]:
    yield _uncut(incoming, config, [[i] for i in range(len(incoming.lengths))], "whole_1f1b")


def in_order(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> Iterator[StepPlan]:
    cap = max(config.capped(incoming.limits).max_tokens, int(incoming.lengths.max(initial=0)))
    yield _uncut(incoming, config, in_order_bins(incoming.lengths.tolist(), cap), "in_order")


def fixed_chunks(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> Iterator[StepPlan]:
    lengths, longest = incoming.lengths, int(incoming.lengths.max(initial=1))
    uncut = incoming.limits.whole_sequences or config.chunks == 1
    limits = config.capped(incoming.limits) if uncut else limits_for(incoming, config)
    if uncut:
        limits = replace(limits, max_tokens=max(limits.max_tokens, longest))
    items = dealt(lengths, context.costs.both, limits.num_ranks)
    block = 1 if uncut else config.block_tokens
    least = max(block, -(-longest // config.chunks))
    for halving in range(1 if uncut else SIZES):
        size = (limits.max_tokens >> halving) // block * block
        if not halving or size >= least:
            packs = [_fixed(of_rank, lengths, size) for of_rank in items]
            yield replace(assembled(incoming, limits, packs), made_by="fixed_chunks")


def algorithm_1(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> Iterator[StepPlan]:
    limits, lengths, price = limits_for(incoming, config), incoming.lengths, context.costs.both
    if limits.whole_sequences or config.chunks == 1:
        raise EvenloadError("algorithm_1 cuts sequences", "sequences stay whole here", "choose another baseline")
    items = dealt(lengths, price, limits.num_ranks)
    for count in (k for k in MESHES if k <= config.chunks or k == MESHES[0]):
        packs = [on_one_mesh(own, lengths, price, count, limits.max_tokens, config.block_tokens) for own in items]
        yield replace(assembled(incoming, limits, packs), made_by="algorithm_1")


def flushed(chunked: StepPlan, groups: list[list[int]], context: PlanningContext) -> StepPlan:
    """The groups of micro-batches one after the other, each a pipeline that drains before the next one fills."""
    if len(groups) < 2:
        return ordered(chunked, context)
    order: list[list[Op]] = [[] for _ in range(chunked.limits.num_stages)]
    for group in groups:
        numbers = sorted(group)
        alone = ordered(chunked.revised(micro_batches=tuple(chunked.micro_batches[i] for i in numbers)), context)
        for ops, of_group in zip(order, alone.order, strict=True):
            ops += [Op(op.kind, numbers[op.micro_batch]) for op in of_group]
    return chunked.revised(order=tuple(map(tuple, order)))


def statically_recomputed(plan: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """With the least number of recomputed layers, one for all chunks and stages, that fits; all where none does."""
    if config.recompute == "off":
        return plan
    budget_bytes = activation_budget_bytes(context.cluster, context.costs.memory, plan.limits)
    stages = range(plan.limits.num_stages)

    def recomputing(count: int) -> StepPlan:
        counts = [min(count, plan.limits.at(stage).layers_per_stage) for stage in stages]
        return plan.revised(recompute=tuple((own,) * len(plan.micro_batches) for own in counts))

    def fits(count: int) -> bool:
        trial = recomputing(count)
        return all(peak <= budget_bytes for stage in stages for peak, _ in peaks_of_stage(trial, stage))

    return recomputing(bisect_left(range(plan.limits.layers_per_stage), True, key=fits))


def adaptively_recomputed(plan: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """By the tied integer program. Raises EvenloadError where nothing fits."""
    return plan if config.recompute == "off" else fitted(plan, context, config)


BASELINES: dict[str, Drafted] = {
    "whole_1f1b": Drafted(whole_1f1b, lambda plan, *_: plan, statically_recomputed),
    "in_order": Drafted(in_order, lambda plan, *_: plan, statically_recomputed),
    "fixed_chunks": Drafted(fixed_chunks, lambda plan, context, _: ordered(plan, context), statically_recomputed),
    "algorithm_1": Drafted(
        algorithm_1,
        lambda plan, context, config: flushed(plan, grouped(plan, context, config), context),
        adaptively_recomputed,
    ),
}


def on_one_mesh(items: list[int], lengths: Ints, price: PassCost, count: int, cap: int, block: int) -> list[Pack]:
    """InfiniPipe's algorithm 1: slices of the mesh that cuts the longest sequence into ``count`` of equal time.

    Full slices run alone; tails and short sequences share chunks under the time of a slice, which is loosened where
    nothing has room, and under the tokens of the first.
    """
    if not items:
        return []
    longest = max(items, key=lambda i: int(lengths[i]))
    cuts = [s.stop for s in evenly(longest, int(lengths[longest]), count, price, cap, block)]
    most_tokens = cuts[0]
    chains: list[list[Slice]] = []
    short: list[int] = []
    for item in items:
        length = int(lengths[item])
        if length <= most_tokens:
            short.append(item)
            continue
        ends = [*cuts[: bisect_right(cuts, length)]]
        ends += [length] if ends[-1] < length else []
        chains.append([Slice(item, a, b) for a, b in zip([0, *ends], ends, strict=False)])
    chains.sort(key=lambda chain: (-len(chain), chain[0].sequence))
    packs: list[Pack] = [[s] for chain in chains for s in chain]
    tails = [k for k, (s,) in enumerate(packs) if s.stop == int(lengths[s.sequence]) and s.stop not in cuts]
    return _buckets(packs, tails, short, lengths, price, float(price.seconds(most_tokens)), most_tokens)


def _buckets(
    packs: list[Pack],
    tails: list[int],
    short: list[int],
    lengths: Ints,
    price: PassCost,
    slice_s: float,
    free_tokens: int,
) -> list[Pack]:
    """Short sequences, longest first, into the tails' chunks and further ones."""
    open_ = list(tails)
    tokens = {k: sum(s.length for s in packs[k]) for k in open_}
    seconds = {k: sum(float(price.seconds(s.length, s.start)) for s in packs[k]) for k in open_}
    for item in sorted(short, key=lambda i: (-int(lengths[i]), i)):
        length, item_s = int(lengths[item]), float(price.seconds(int(lengths[item])))
        roomy = [k for k in open_ if tokens[k] + length <= free_tokens]
        if roomy:
            roomy.sort(key=lambda k: (seconds[k] / tokens[k], k))
            chosen = next((k for k in roomy if seconds[k] + item_s <= slice_s), None)
            if chosen is None:
                chosen = min(roomy, key=lambda k: (seconds[k], k))
                slice_s = seconds[chosen] + item_s
        else:
            chosen = len(packs)
            packs.append([])
            open_.append(chosen)
            tokens[chosen], seconds[chosen] = 0, 0.0
        packs[chosen].append(Slice(item, 0, length))
        tokens[chosen] += length
        seconds[chosen] += item_s
    return packs


def _fixed(items: list[int], lengths: Ints, size: int) -> list[Pack]:
    """Long sequences in chunks of ``size`` tokens, a micro-batch each, most chunks first; the others best-fit."""
    return in_chunks(sorted(items, key=lambda i: (-int(lengths[i]), i)), lengths, size, size)


def _uncut(incoming: StepPlan, config: PipelineConfig, bins: list[list[int]], name: str) -> StepPlan:
    """Packs of whole sequences, dealt out in turn, in the host's own schedule, under a cap that holds the longest."""
    limits, lengths = config.capped(incoming.limits), incoming.lengths.tolist()
    packs = [[Slice(i, 0, lengths[i]) for i in numbers] for numbers in bins]
    dealt_out = [packs[rank :: limits.num_ranks] for rank in range(limits.num_ranks)]
    cap = max([limits.max_tokens, *lengths])
    return replace(assembled(incoming, replace(limits, max_tokens=cap), dealt_out), made_by=name)
