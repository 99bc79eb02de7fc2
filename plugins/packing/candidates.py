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
from typing import NamedTuple

import numpy as np

from ...core.aliases import Ints
from ...core.balance.partition import longest_first, members
from ...core.balance.slicing import in_chunks
from ...core.costs.costs import Costs, PassCost
from ...core.plan.limits import Limits
from ...core.plan.step_plan import Slice, StepPlan
from .assemble import assemble
from .config import PackingConfig
from .dispatch import dispatch, slots
from .slicing import Packs, WorkBudget, fill
from .whole import by_launches, keeps_units, whole_packs

_MOST_COUNTS = 64
"""Numbers of micro-batches of one rank that are tried, from the fewest on, before its sequences run in chunks."""
_LEAST_WORK, _WORK = 1 << 20, 64
"""Work that one plan may take to find slices of equal cost, and for each of its sequences."""
_MOST_TRIES = 8
"""Numbers of micro-batches tried where the first leaves too much in one of them."""


class _Task(NamedTuple):
    """What is to be planned, and what the search for slices of equal cost may take."""

    incoming: StepPlan
    limits: Limits
    costs: Costs
    config: PackingConfig
    work: WorkBudget


def portfolio(
    incoming: StepPlan, limits: Limits, costs: Costs, config: PackingConfig, bound_s: float
) -> Iterator[StepPlan]:
    """The candidates, those most likely to be taken first.

    Slices of equal cost are searched for within `_LEAST_WORK`, or `_WORK` for each sequence; then ranks run chunks.
    """
    lengths = incoming.lengths
    task = _Task(incoming, limits, costs, config, WorkBudget(max(_LEAST_WORK, _WORK * len(lengths))))
    fits = int(lengths.max(initial=0)) <= limits.max_tokens
    if fits and config.slices == "auto":
        yield whole(incoming, limits, costs, bound_s)
    for per_rank in (
        _slots_per_rank(lengths, limits, costs) if len(lengths) and not keeps_units(incoming, limits) else []
    ):
        yield from _even(task, per_rank)
    if fits and config.slices != "auto":
        yield whole(incoming, limits, costs, bound_s)
    if not fits:
        yield assemble(incoming, limits, _filled(task, by_launches(incoming, limits, costs, bound_s), None, costs.both))
        yield chunked(incoming, limits, costs, config.block_tokens)


def whole(incoming: StepPlan, limits: Limits, costs: Costs, bound_s: float, made_by: str = "packing") -> StepPlan:
    """The plan that cuts nothing."""
    return uncut(incoming, limits, whole_packs(incoming, limits, costs, bound_s), made_by)


def uncut(incoming: StepPlan, limits: Limits, packs: list[list[list[int]]], made_by: str) -> StepPlan:
    """The plan of whole sequences, by their numbers: ``packs[r][k]`` are those of micro-batch k of rank r."""
    sizes = incoming.lengths.tolist()
    slices = [[[Slice(i, 0, sizes[i]) for i in pack] for pack in of_rank] for of_rank in packs]
    return assemble(incoming, limits, slices, made_by=made_by)


def chunked(incoming: StepPlan, limits: Limits, costs: Costs, block: int) -> StepPlan:
    """Sequences to ranks by cost; on each, long ones in chunks of the cap, a micro-batch each, the others best-fit.

    A chunk is as many whole blocks of tokens as the cap holds; the cap itself where it holds none.
    """
    lengths, cap = incoming.lengths, limits.max_tokens
    if keeps_units(incoming, limits):
        items = by_launches(incoming, limits, costs, 0.0)
    else:
        items = members(longest_first(costs.sequence_s(lengths), limits.num_ranks), limits.num_ranks)
    return assemble(incoming, limits, [_chunks_of(of_rank, lengths, cap, block) for of_rank in items])


def _chunks_of(items: list[int], lengths: Ints, cap: int, block: int) -> Packs:
    return in_chunks(items, lengths, cap // block * block or cap, cap)


def _slots_per_rank(lengths: Ints, limits: Limits, costs: Costs) -> list[int]:
    """How many micro-batches an ordinary rank may have: as many as hold short sequences for its share of the cost, or
    more where a pipeline gains by them."""
    cost_s = costs.sequence_s(lengths)
    own = cost_s > cost_s.sum() / limits.num_ranks
    # Outliers have ranks of their own; the mean is that of the others.
    mean_s = float(cost_s[~own].sum()) / max(1, limits.num_ranks - int(own.sum()))
    token_s = costs.forward.linear_s + costs.backward.linear_s
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


def _even(task: _Task, per_rank: int) -> Iterator[StepPlan]:
    """Equal micro-batches, more of them until none is over the cap. Groups of its own cost the backward one more
    forward, unless it runs one anyway; a replay holds all activations of its micro-batch at once, so under a memory cap
    both forms are offered."""
    costs = task.costs
    forms: list[tuple[PassCost, ...]] = [(costs.both,)]
    if task.config.asymmetric and costs.recompute:
        capped = task.limits.max_activation_bytes < float("inf")
        forms = [(costs.forward, costs.backward), *(forms if capped else [])]
    for prices in forms:
        for more in range(_MOST_TRIES):
            plan, fits = _in_slots(task, prices, per_rank + more)
            if fits:
                break
        yield plan


def _in_slots(task: _Task, prices: tuple[PassCost, ...], per_rank: int) -> tuple[StepPlan, bool]:
    """A plan of equal micro-batches, and whether ordinary ranks got along with ``per_rank`` of them. One price groups
    both directions alike; two are those of the forward and the backward, each with its own groups."""
    incoming, limits = task.incoming, task.limits
    order = np.argsort(-incoming.lengths, kind="stable")
    weights = np.array([price.seconds(incoming.lengths[order] * 1.0) for price in prices])
    slots_of = slots(weights, limits.num_ranks, per_rank)
    items = [order[places].tolist() for places in dispatch(weights, slots_of)]
    fits, grouped = True, []
    for own, price in zip(slots_of, prices, strict=True):
        wanted = _in_groups(own.counts, limits.together)
        packs = _filled(task, items, wanted, price)
        fits = fits and all(len(of_rank) <= count for of_rank, count in zip(packs, wanted, strict=True))
        grouped.append(packs)
    backward = [of_rank[::-1] for of_rank in grouped[1]] if len(grouped) > 1 else None
    return assemble(incoming, limits, grouped[0], backward), fits


def _in_groups(counts: list[int], size: int) -> list[int]:
    """As many micro-batches on each rank as on that of its group which has most."""
    return [max(counts[rank // size * size : (rank // size + 1) * size]) for rank in range(len(counts))]


def _filled(task: _Task, items: list[list[int]], counts: list[int] | None, price: PassCost) -> list[Packs]:
    """Micro-batches of every rank, as few as the token cap allows, or ``counts`` equal ones (more where it demands).
    Chunks where no number of them is found: slices of equal cost may leave room for less than a block in each."""
    lengths, work, even = task.incoming.lengths, task.work, counts is not None
    cap, block = task.limits.max_tokens, task.config.block_tokens
    filled = []
    for rank, own in enumerate(items):
        count = max(counts[rank] if counts else 1, -(-int(lengths[own].sum()) // cap), 1)
        numbers = (n for n in range(count, count + _MOST_COUNTS) if work.spend(len(own)))
        tried = (fill(own, lengths, price, n, cap, block, even=even, work=work) for n in numbers)
        packs = next((packs for packs in tried if packs is not None), None) if own else []
        filled.append(_chunks_of(own, lengths, cap, block) if packs is None else packs)
    return filled
