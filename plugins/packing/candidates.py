"""The plans that `plan` chooses from.

even    every micro-batch of the batch costs alike (`dispatch`, `slicing`), costlier sequences in slices; with
        `train.recompute` also with groups of their own for the backward
whole   no sequence is cut (`whole`); only where none is longer than a micro-batch may be
long    otherwise: the longest are cut into as few slices of equal cost as the token cap allows
chunked otherwise: the longest are cut into slices of as many tokens as the cap allows (ChunkFlow, arXiv 2503.02356),
        which are fewest, and hold least
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.aliases import Ints
from ...core.balance.partition import best_fit_decreasing, longest_first
from ...core.balance.work import Work
from ...core.costs.costs import Costs, PassCost
from ...core.plan.limits import Limits
from ...core.plan.step_plan import Slice, StepPlan
from .assemble import assemble
from .config import PackingConfig
from .dispatch import dispatch, slots
from .slicing import Packs, fill
from .whole import by_launches, whole_packs

_MOST_COUNTS = 64
"""Numbers of micro-batches of one rank that are tried, from the fewest on, before its sequences run in chunks."""
_LEAST_WORK, _WORK = 1 << 20, 64
"""Work that one plan may take to find slices of equal cost, and for each of its sequences."""
_MOST_TRIES = 8
"""Numbers of micro-batches tried where the first leaves too much in one of them."""


def portfolio(
    incoming: StepPlan, lengths: Ints, limits: Limits, costs: Costs, config: PackingConfig, bound_s: float
) -> Iterator[StepPlan]:
    """The candidates, those most likely to be taken first. lengths int64 [K].

    Slices of equal cost are searched for within `_LEAST_WORK`, or `_WORK` for each sequence; then ranks run chunks.
    """
    work = Work(max(_LEAST_WORK, _WORK * len(lengths)))
    fits = not len(lengths) or int(lengths.max()) <= limits.max_tokens
    if fits and config.slices == "auto":
        yield whole(incoming, lengths, limits, costs, bound_s)
    for per_rank in _slots_per_rank(lengths, limits, costs) if len(lengths) else []:
        yield from _even(incoming, lengths, limits, costs, config, per_rank, work)
    if fits and config.slices != "auto":
        yield whole(incoming, lengths, limits, costs, bound_s)
    if not fits:
        items = by_launches(lengths, limits, costs, bound_s)
        yield assemble(
            incoming, limits, _filled(items, None, lengths, costs.forward.plus(costs.backward), limits, config, work)
        )
        yield chunked(incoming, lengths, limits, costs, config.block_tokens)


def whole(incoming: StepPlan, lengths: Ints, limits: Limits, costs: Costs, bound_s: float) -> StepPlan:
    """The plan that cuts nothing."""
    sizes = lengths.tolist()
    packs = whole_packs(lengths, limits, costs, bound_s)
    return assemble(
        incoming, limits, [[[Slice(i, 0, sizes[i]) for i in b] for b in rank_packs] for rank_packs in packs]
    )


def chunked(incoming: StepPlan, lengths: Ints, limits: Limits, costs: Costs, block: int) -> StepPlan:
    """Sequences to ranks by cost; on each, long ones in chunks of the cap, a micro-batch each, the others best-fit.

    A chunk is as many whole blocks of tokens as the cap holds; the cap itself where it holds none.
    """
    ranks = longest_first(costs.sequence_s(lengths), limits.num_ranks)
    items = [np.flatnonzero(ranks == rank).tolist() for rank in range(limits.num_ranks)]
    return assemble(
        incoming, limits, [_chunks_of(rank_items, lengths, limits.max_tokens, block) for rank_items in items]
    )


def _chunks_of(items: list[int], lengths: Ints, cap: int, block: int) -> Packs:
    """The micro-batches of one rank."""
    chunk = cap // block * block or cap
    sized = [(i, int(lengths[i])) for i in items]
    cut = [[Slice(i, start, min(start + chunk, n))] for i, n in sized if n > cap for start in range(0, n, chunk)]
    short = [(i, n) for i, n in sized if n <= cap]
    filled = best_fit_decreasing([n for _, n in short], cap)
    return cut + [[Slice(short[k][0], 0, short[k][1]) for k in pack] for pack in filled]


def _slots_per_rank(lengths: Ints, limits: Limits, costs: Costs) -> list[int]:
    """How many micro-batches an ordinary rank may have: as many as hold short sequences for its share of the cost, or
    more where a pipeline gains by them."""
    cost_s = costs.sequence_s(lengths)
    own = cost_s > cost_s.sum() / limits.num_ranks
    # Outliers have ranks of their own; the mean is that of the others.
    mean_s = float(cost_s[~own].sum()) / max(1, limits.num_ranks - int(own.sum()))
    token_s = costs.forward.token_s + costs.backward.token_s
    fewest = max(1, -(-int(lengths.sum()) // (limits.max_tokens * limits.num_ranks)))
    if token_s:
        fewest = max(fewest, min(2 * fewest, int(np.ceil(mean_s / (token_s * limits.max_tokens)))))
    if limits.num_stages == 1:
        # Under a memory cap smaller micro-batches may be the only ones that fit.
        return [fewest * factor for factor in ((1, 2, 4, 8) if limits.max_activation_bytes < float("inf") else (1,))]

    def step_s(count: int) -> float:
        return (count + limits.num_stages - 1) * (mean_s / count + costs.launch_s)

    tried = sorted({max(fewest, round(fewest * factor)) for factor in (1, 1.5, 2, 3, 4, 6, 8, 12, 16)}, key=step_s)
    return tried[:2]


def _even(
    incoming: StepPlan, lengths: Ints, limits: Limits, costs: Costs, config: PackingConfig, per_rank: int, work: Work
) -> Iterator[StepPlan]:
    """Equal micro-batches, more of them until none is over the cap.

    Groups of its own cost the backward one more forward, unless it runs one anyway; a replay holds all activations of
    its micro-batch at once, so under a memory cap both forms are offered.
    """
    forms: list[tuple[PassCost, ...]] = [(costs.forward.plus(costs.backward),)]
    if config.asymmetric and costs.recompute:
        forms = [(costs.forward, costs.backward), *(forms if limits.max_activation_bytes < float("inf") else [])]
    for prices in forms:
        for more in range(_MOST_TRIES):
            plan, fits = _in_slots(incoming, lengths, limits, config, prices, per_rank + more, work)
            if fits:
                break
        yield plan


def _in_slots(
    incoming: StepPlan,
    lengths: Ints,
    limits: Limits,
    config: PackingConfig,
    prices: tuple[PassCost, ...],
    per_rank: int,
    work: Work,
) -> tuple[StepPlan, bool]:
    """A plan of equal micro-batches, and whether ordinary ranks got along with ``per_rank`` of them.

    One price groups both directions alike; two are those of the forward and the backward, each with its own groups.
    """
    order = np.argsort(-lengths, kind="stable")
    weights = np.array([price.seconds(lengths[order] * 1.0) for price in prices])
    directions = slots(weights, limits.num_ranks, per_rank)
    items = [order[rank_packs].tolist() for rank_packs in dispatch(weights, directions)]
    fits, grouped = True, []
    for direction, price in zip(directions, prices, strict=True):
        wanted = [max(direction.counts)] * limits.num_ranks if limits.equal_counts else direction.counts
        packs = _filled(items, wanted, lengths, price, limits, config, work)
        fits = fits and all(len(rank_packs) <= count for rank_packs, count in zip(packs, wanted, strict=True))
        grouped.append(packs)
    if len(grouped) == 1:
        return assemble(incoming, limits, grouped[0]), fits
    forward, backward = grouped
    return assemble(incoming, limits, forward, [rank_packs[::-1] for rank_packs in backward]), fits


def _filled(
    items: list[list[int]],
    counts: list[int] | None,
    lengths: Ints,
    price: PassCost,
    limits: Limits,
    config: PackingConfig,
    work: Work,
) -> list[Packs]:
    """Micro-batches of every rank, as few as the token cap allows, or ``counts`` equal ones (more where it demands).

    Chunks where no number of them is found: slices of equal cost may leave room for less than a block in each.
    """
    cap, block, even = limits.max_tokens, config.block_tokens, counts is not None
    out = []
    for rank, rank_items in enumerate(items):
        count = max(counts[rank] if counts else 1, -(-int(lengths[rank_items].sum()) // cap), 1)
        numbers = (n for n in range(count, count + _MOST_COUNTS) if work.spend(len(rank_items)))
        tried = (fill(rank_items, lengths, price, n, cap, block, even=even, work=work) for n in numbers)
        packs = next((packs for packs in tried if packs is not None), None) if rank_items else []
        out.append(_chunks_of(rank_items, lengths, cap, block) if packs is None else packs)
    return out
