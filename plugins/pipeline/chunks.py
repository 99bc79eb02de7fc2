"""The sequence processor: chunks of equal time, and in which order they run forward.

InfiniPipe (arXiv 2509.21275, algorithm 1) cuts all long sequences at one mesh, that of the longest one, which leaves
each of the others a ragged tail. Here every long sequence gets a mesh of its own,

    m_i = ceil(t_i / T - 0.35)      slices of equal time t_i / m_i        T  seconds of a chunk
                                                                          t_i seconds of the sequence, both directions

and short sequences are packed into what the slices leave of T, or into chunks of their own, longest first onto
the cheapest. T is enumerated: more chunks mean smaller bubbles, and more launches. Sequences of most chunks run first,
since a stage would otherwise wait for their backwards in the middle of a step (InfiniPipe, section IV). `opening` puts
small ones before them. What ranks share in the plan that came in stays on them, comes first, and is cut at the same T.

O(K log K) for K sequences and each T.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...core.aliases import Ints
from ...core.balance.level import level
from ...core.balance.partition import fill, members
from ...core.balance.slicing import evenly
from ...core.costs.context import Direction, PlanningContext
from ...core.costs.costs import PassCost
from ...core.costs.exposed import exposed_s
from ...core.errors import EvenloadError
from ...core.machine.layout import share_of
from ...core.plan.limits import Limits
from ...core.plan.order import in_turn
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from .clock import clock_of
from .config import PipelineConfig
from .elastic import groups_in_rounds

Pack = list[Slice]

TOLERANCE = 0.35
"""Share of a chunk's time by which a slice may exceed it, so that a sequence is not cut for so little."""
FACTORS = (0.8, 0.7, 1.0, 0.9, 0.6, 0.45, 1.25, 0.35, 1.6, 2.5)
"""Numbers of chunks tried, over the one at which a launch more costs what the bubble loses: the first three, and more
of them while all have no more than `CHEAP` chunks together."""
LEAST_SHARED = 4
"""Tokens that a rank has at least of a slice that it shares: with every cp_comm each rank then has some."""
PROBES = 1024, 8192
"""Tokens for which the traffic inside a pass is asked."""
CHEAP = 400
LARGEST = 1 << 15
"""Chunks of all ranks times stages, about, up to which smaller ones are tried: planning takes time in proportion."""


def chunkings(
    incoming: StepPlan, limits: Limits, context: PlanningContext, config: PipelineConfig
) -> Iterator[StepPlan]:
    """Plans without an order: micro-batches of each rank in forward order, most promising number of chunks first.

    Raises EvenloadError where a sequence is over the cap and may not be cut.
    """
    lengths = incoming.lengths
    if not len(lengths):
        return
    most = 1 if limits.whole_sequences else config.chunks
    if most == 1:
        refuse_longer(lengths, limits)
    price, seen = price_of(context), set[tuple[MicroBatch, ...]]()
    for shared in dict.fromkeys((() if limits.v_shape else shared_of(incoming), ())):
        came_s = _seconds_of_ranks(incoming, shared, context)
        in_shared = {s.sequence for m in shared for s in m.slices}
        alone = np.array([i for i in range(len(lengths)) if i not in in_shared], dtype=np.int64)
        mean_s = (float(price.seconds(lengths[alone]).sum()) + sum(came_s)) / limits.num_ranks
        for count in counts(lengths, price, limits):
            slice_s = mean_s / count
            # What is dealt will be in so many launches, which the shared micro-batches have already.
            launching = 1.0 + price.launch_s / slice_s if slice_s else 1.0
            again = recut(shared, lengths, price, slice_s, limits.max_tokens, most, config.block_tokens)
            more = Counter(rank for m in again for rank in m.ranks)
            more.subtract(rank for m in shared for rank in m.ranks)
            base_s = [(s + more[rank] * price.launch_s) / launching for rank, s in enumerate(came_s)]
            packs = [
                chunks_of(alone[places].tolist(), lengths, price, slice_s, limits.max_tokens, most, config.block_tokens)
                for places in dealt(lengths[alone], price, limits.num_ranks, base_s)
            ]
            plan = assembled(incoming, limits, packs, again)
            # What is in no rounds gets no order, without which no sequence may be cut.
            if plan.micro_batches not in seen and not (again and groups_in_rounds(plan) is None):
                seen.add(plan.micro_batches)
                yield plan


def shared_of(incoming: StepPlan) -> tuple[MicroBatch, ...]:
    """The micro-batches that ranks share, those of most ranks first; none where sequences are partly in others."""
    shared = sorted((m for m in incoming.micro_batches if len(m.ranks) > 1), key=lambda m: -len(m.ranks))
    in_shared = {s.sequence for m in shared for s in m.slices}
    others = (s.sequence for m in incoming.micro_batches if len(m.ranks) == 1 for s in m.slices)
    return () if incoming.backward or not in_shared.isdisjoint(others) else tuple(shared)


def recut(
    shared: tuple[MicroBatch, ...], lengths: Ints, price: PassCost, slice_s: float, cap: int, most: int, block: int
) -> tuple[MicroBatch, ...]:
    """These micro-batches, those of one sequence alone on its ranks cut into slices of about ``slice_s`` seconds."""
    chains: dict[Any, list[MicroBatch]] = {}
    for m in shared:
        chains.setdefault((m.slices[0].sequence, m._replace(slices=())) if len(m.slices) == 1 else m, []).append(m)
    result = []
    for chain in chains.values():
        own, ranks = chain[0].slices, len(chain[0].ranks)
        length = int(lengths[own[0].sequence])
        if len(own) == 1 and sum(m.num_tokens for m in chain) == length:
            wanted = math.ceil(float(price.seconds(length)) / ranks / slice_s - TOLERANCE) if slice_s else 1
            parts = min(most, max(1, wanted))
            least = ranks * block * -(-LEAST_SHARED // block)
            whole_cap = ranks * (cap - 2)
            slices = evenly(own[0].sequence, length, parts, price, whole_cap, least) if whole_cap >= least else []
            if slices and slices[-1].length >= least:
                chain = [chain[0]._replace(slices=(s,)) for s in slices]
        result += chain
    return tuple(result)


def _seconds_of_ranks(incoming: StepPlan, shared: tuple[MicroBatch, ...], context: PlanningContext) -> list[float]:
    """What each rank has of these micro-batches, at a middle stage [s]."""
    busy_s = [0.0] * incoming.limits.num_ranks
    if shared:
        clock, stage = clock_of(incoming, context), min(1, incoming.limits.num_stages - 1)
        for m, *both in zip(incoming.micro_batches, clock.forward[stage], clock.backward[stage], strict=True):
            for rank in m.ranks if len(m.ranks) > 1 else ():
                busy_s[rank] += sum(both)
    return busy_s


def price_of(context: PlanningContext) -> PassCost:
    """Seconds of a pass forward and one backward, with what tensor parallelism moves in them at a middle stage."""
    costs, stage = context.costs.kept() if context.costs.recompute else context.costs, min(1, context.layout.pp - 1)
    packs = (MicroBatch((Slice(0, 0, tokens),), (0,)) for tokens in PROBES)
    directions = Direction(costs.forward, 1, stage), Direction(costs.backward, 2, stage)
    few_s, many_s = (sum(exposed_s(context, one, pack) for one in directions) for pack in packs)
    token_s = (many_s - few_s) / (PROBES[1] - PROBES[0])
    price = costs.both
    launch_s = price.launch_s + max(0.0, few_s - PROBES[0] * token_s)
    return price.model_copy(update={"token_s": price.token_s + token_s, "launch_s": launch_s})


def least_s(plan: StepPlan, context: PlanningContext, *, split: bool = False) -> float:
    """Passes of micro-batches take no less in any order [s], what moves in them on single ranks included; 0 where ranks
    share experts. ``split``: backwards may leave weight gradients to passes of their own."""
    if context.layout.ep > 1:
        return 0.0
    price, busy_s = price_of(context), [0.0] * plan.limits.num_ranks
    # Besides its own passes a stage waits for the first micro-batch to come; also for the last one to go back from it,
    # unless it has weight gradients to compute meanwhile.
    travels, waits_s = context.costs.forward if split else price, math.inf
    for m in plan.micro_batches:
        for rank in m.ranks:
            busy_s[rank] += _seconds(price, m)
        waits_s = min(waits_s, _seconds(travels, m))
    if plan.limits.v_shape:  # the device with the output layer has two stages of mean work, or more
        return 2 * max(busy_s)
    if not plan.micro_batches:
        return max(busy_s)
    shares = [share_of(context.layout.layers, stage) for stage in range(plan.limits.num_stages)]
    before, beside_head = list(accumulate(shares, initial=0.0)), 1.0 - context.head_frac
    ends = [share * beside_head for share in shares[:-1]] + shares[-1:]
    return max(max(busy_s) * work + waits_s * ahead * beside_head for work, ahead in zip(ends, before, strict=False))


def _seconds(price: PassCost, micro_batch: MicroBatch) -> float:
    slices_s = sum(float(price.seconds(s.stop - s.start, s.start)) for s in micro_batch.slices)
    return price.launch_s + slices_s / len(micro_batch.ranks)


def refuse_longer(lengths: Ints, limits: Limits) -> None:
    """Raise EvenloadError for a sequence over the token cap, where none may be cut."""
    if lengths.max(initial=0) > limits.max_tokens:
        index = int(lengths.argmax())
        raise EvenloadError(
            "a sequence is longer than a micro-batch of the pipeline may be, and is not to be cut",
            f"sequence {index} has {lengths[index]} tokens, the cap is {limits.max_tokens}",
            "raise plugins.pipeline.max_tokens, or let it be cut (plugins.pipeline.chunks > 1, where the host can)",
        )


def dealt(lengths: Ints, price: PassCost, num_ranks: int, base_s: Sequence[float] = ()) -> list[list[int]]:
    """Sequences of each rank, whole, so that all ranks cost alike with ``base_s`` [s] that they have already. lengths
    int64 [K]."""
    if num_ranks == 1:
        return [list(range(len(lengths)))]
    base = np.array([base_s or np.zeros(num_ranks)])
    ranks = level(price.seconds(lengths * 1.0)[None], np.ones((1, num_ranks)), base)
    return members(ranks, num_ranks)


def counts(lengths: Ints, price: PassCost, limits: Limits) -> list[int]:
    """How many chunks a rank may have: around the number at which (count + stages - 1) chunks take least time."""
    mean_s = float(price.seconds(lengths).sum()) / limits.num_ranks
    fewest = max(1, -(-int(lengths.sum()) // (limits.max_tokens * limits.num_ranks)))
    # Half forwards fill a V, whose devices run each chunk twice.
    ahead = max(1, limits.num_stages - 1) if not limits.v_shape else max(1, (limits.num_devices - 1) / 2)
    most = max(fewest, int(lengths.sum()) // limits.num_ranks)
    best = math.sqrt(ahead * mean_s / price.launch_s) if price.launch_s else 64.0 * ahead
    best = min(best, 96.0 * ahead, LARGEST / (limits.num_ranks * limits.num_stages))
    best = max(best, limits.num_devices if limits.v_shape else 2.0 * limits.num_stages)
    tried = list(dict.fromkeys(min(most, max(fewest, round(best * factor))) for factor in FACTORS))
    sums = accumulate(count * limits.num_ranks for count in tried)
    return [count for place, (count, sum_) in enumerate(zip(tried, sums, strict=True)) if place < 3 or sum_ <= CHEAP]


def chunks_of(
    items: list[int], lengths: Ints, price: PassCost, slice_s: float, cap: int, most: int, block: int
) -> list[Pack]:
    """Chunks of one rank's sequences ``items`` in forward order, each of about ``slice_s`` and at most ``cap`` tokens.

    ``most`` chunks a sequence, unless the cap demands more.
    """
    seconds = price.seconds(lengths * 1.0)
    chains: list[list[Slice]] = []
    short: list[int] = []
    for item in items:
        length = int(lengths[item])
        parts = min(most, max(1, math.ceil(float(seconds[item]) / slice_s - TOLERANCE))) if slice_s else 1
        if parts > 1 or length > cap:
            chains.append(evenly(item, length, parts, price, cap, block))
        else:
            short.append(item)
    chains.sort(key=lambda chain: (-len(chain), chain[0].sequence))
    packs = [[s] for chain in chains for s in chain]
    loads = [float(price.seconds(s.length, s.start)) for chain in chains for s in chain]
    short.sort(key=lambda i: (-float(seconds[i]), i))
    wanted_s = float(seconds[short].sum()) - sum(max(0.0, slice_s - load) for load in loads)
    more = max(0, math.ceil(wanted_s / slice_s - TOLERANCE)) if slice_s else 1
    packs += [[] for _ in range(more)]
    loads += [0.0] * more
    spaces = [cap - sum(s.length for s in pack) for pack in packs]
    chosen = fill(short, seconds.tolist(), lengths.tolist(), spaces, loads, cap)
    assert chosen is not None
    packs += [[] for _ in spaces[len(packs) :]]
    for item, b in zip(short, chosen, strict=True):
        packs[b].append(Slice(item, 0, int(lengths[item])))
    return [pack for pack in packs if pack]


def assembled(
    incoming: StepPlan, limits: Limits, packs: list[list[Pack]], shared: tuple[MicroBatch, ...] = ()
) -> StepPlan:
    """The plan of ``packs[rank]``, in forward order: the k-th micro-batch of each rank, then the next of each rank.
    Shared ones come before."""
    busy = {rank for m in shared for rank in m.ranks}
    launched = in_turn([of_rank or [[]][rank in busy :] for rank, of_rank in enumerate(packs)])
    micro_batches = (*shared, *(MicroBatch(tuple(pack), (rank,)) for rank, pack in launched))
    return incoming.with_micro_batches(micro_batches, limits, "pipeline")
