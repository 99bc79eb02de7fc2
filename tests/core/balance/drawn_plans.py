"""Lawful plans drawn at random, of every freedom that planners have on ranks that share no sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from evenload.core.costs.context import PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.machine.cluster import Cluster, Link
from evenload.core.machine.layout import Layout, unless_equal
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.rounds import backwards_of, reach_of
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths

LENGTHS = ("ones", "at the cap", "one long", "one short", "few", "heavy", "equal", "many")


class Drawn(NamedTuple):
    """A plan and what it is judged by."""

    plan: StepPlan
    context: PlanningContext


def drawn(seed: int, *, recompute: bool = False, orders: bool = True, unequal: bool = False) -> Drawn:
    """A plan and its setting; ``recompute``: that of the recipe; ``orders``: the plan may say what is recomputed;
    ``unequal``: stages have unequal numbers of layers."""
    random = np.random.default_rng([3, seed])
    stages, ranks, cap = int(random.integers(1, 6)), int(random.integers(1, 4)), int(random.choice([8, 64, 512]))
    lengths = _lengths(random, cap)
    context = _context(random, stages, ranks, recompute=recompute)
    limits = Limits(
        ranks, cap, stages, layers_per_stage=4, memory=context.costs.memory, splits_backward=bool(random.random() < 0.6)
    )
    most = [4] * stages
    if unequal:
        most = np.random.default_rng([4, seed]).integers(1, 8, stages).tolist()
        layers = unless_equal(tuple(most))
        limits = replace(limits, layers_per_stage=max(most), layers=layers)
        context = replace(context, layout=replace(context.layout, layers=layers))
    packs = _packs(random, lengths, ranks, cap, stages)
    micro_batches = tuple(MicroBatch(tuple(pack), (rank,)) for rank, own in enumerate(packs) for pack in own)
    plan = StepPlan(as_lengths(lengths), micro_batches, limits)
    order = _order(random, plan, limits)
    chosen = random.random() < 0.5
    replayed = tuple(i for i in range(len(micro_batches)) if chosen and random.random() < 0.5)
    plan = plan.revised(order=order, replayed=replayed)
    if orders and random.random() < 0.4:
        rows = random.integers(0, 5, (stages, len(micro_batches))).clip(max=np.array(most)[:, None]).tolist()
        plan = plan.revised(recompute=tuple(map(tuple, rows)))
    return Drawn(plan, context)


def _lengths(random: np.random.Generator, cap: int) -> list[int]:
    kind, count = str(random.choice(LENGTHS)), int(random.integers(1, 25))
    rows: dict[str, Any] = {
        "ones": [1] * count,
        "at the cap": [cap] * min(count, 6),
        "one long": [int(random.integers(1, 9)) * cap + 1],
        "one short": [1],
        "few": random.integers(1, cap + 1, 2).tolist(),
        "heavy": np.clip(random.lognormal(np.log(cap / 4), 1.2, count), 1, 8 * cap).astype(int).tolist(),
        "equal": [max(1, cap // 4)] * count,
        "many": [1] * int(random.integers(30, 400)),
    }
    return list(map(int, rows[kind]))


def _context(random: np.random.Generator, stages: int, ranks: int, *, recompute: bool) -> PlanningContext:
    tp, launch = int(random.choice([1, 1, 2, 8])), float(random.choice([0.0, 1e-4, 1e-2]))
    token, pair = float(random.choice([1e-4, 1e-3])), float(random.choice([0.0, 1e-6, 1e-4]))
    linear, square, late = random.uniform(0.5, 3.0), random.uniform(1.0, 3.0), random.uniform(0.5, 2.0)
    forward = PassCost(launch_s=launch, token_s=token, pair_s=pair)
    backward = PassCost(launch_s=launch * late, token_s=token * linear, pair_s=pair * square)
    memory = MemoryCost(
        activation_bytes_per_token=100.0,
        cut_saves_bytes_per_token=float(random.choice([0.0, 10.0])),
        head_bytes_per_token=float(random.choice([0.0, 30.0])),
        kv_bytes_per_token=float(random.choice([0.0, 20.0])),
        kv_grad_bytes_per_token=float(random.choice([0.0, 40.0])),
        working_bytes_per_token=float(random.choice([0.0, 30.0])),
        input_bytes_per_token=5.0,
        deferred_bytes_per_token=float(random.choice([0.0, 50.0])),
        pass_bytes=float(random.choice([0.0, 100.0])),
    )
    costs = Costs(source="drawn", forward=forward, backward=backward, memory=memory, num_layers=4 * stages)
    links = {
        name: Link(latency_s=float(random.choice([0.0, 1e-5])), bytes_per_s=float(random.choice([1e6, 1e9])))
        for name in ("intra", "inter")
    }
    cluster = Cluster(
        name="drawn",
        source="drawn",
        ranks_per_node=int(random.choice([2, 8])),
        flops_per_s=1e12,
        memory_bytes=1e9,
        **links,
    )
    traffic = Traffic(
        layers=4, state_bytes_per_token=float(random.choice([0.0, 64.0])), waits_for_sends=bool(random.random() < 0.3)
    )
    costs = costs.recomputed(20.0) if recompute else costs
    head_frac = float(random.choice([0.0, 0.05, 0.9 / stages]))
    return PlanningContext(costs, Layout(tp, stages, 1, 1, ranks), cluster, traffic, head_frac)


def _packs(
    random: np.random.Generator, lengths: list[int], ranks: int, cap: int, stages: int
) -> list[list[list[Slice]]]:
    """Slices of each rank's micro-batches in the order of their forwards."""
    packs: list[list[list[Slice]]] = [[] for _ in range(ranks)]
    if len(lengths) > 24 and random.random() < 0.8:
        return [_growing(random, list(range(rank, len(lengths), ranks)), cap, stages) for rank in range(ranks)]
    size = int(random.integers(1, cap + 1)) if random.random() < 0.7 else cap
    for number, length in enumerate(lengths):
        own, start, least = packs[int(random.integers(ranks))], 0, 0
        while start < length:
            stop = min(length, start + int(random.integers(max(1, size // 2), size + 1)))
            open_ = [
                at
                for at in range(least, len(own))
                if sum(s.length for s in own[at]) + stop - start <= cap and random.random() < 0.7
            ]
            at = int(random.choice(open_)) if open_ else len(own)
            if at == len(own):
                own.append([])
            own[at].append(Slice(number, start, stop))
            start, least = stop, at + 1
    if random.random() < 0.2:
        packs[0].insert(0, [])  # a dummy
    return packs


def _growing(random: np.random.Generator, numbers: list[int], cap: int, stages: int) -> list[list[Slice]]:
    """Sequences of one token in micro-batches each of which is larger than the one before it, or smaller; such that a
    stage that gets them one by one may be busy all the time."""
    growth = 1.0 + float(random.uniform(0.2, 2.5)) / max(1, stages - 1)
    sizes, left = [float(random.uniform(1, 4))], len(numbers)
    while sum(map(round, sizes)) < left:
        sizes.append(sizes[-1] * growth)
    packs: list[list[Slice]] = []
    for size in sizes if random.random() < 0.7 else sizes[::-1]:
        mine, numbers = numbers[: min(cap, round(size))], numbers[min(cap, round(size)) :]
        packs += [[Slice(number, 0, 1) for number in mine]] if mine else []
    return packs + [[Slice(number, 0, 1)] for number in numbers]


def _order(random: np.random.Generator, plan: StepPlan, limits: Limits) -> tuple[tuple[Op, ...], ...]:
    """All stages run forwards in one order and backwards in another, earlier ones as far ahead as later ones."""
    each, most = int(random.integers(1, 4)), int(random.integers(0, 4))
    order: list[list[Op]] = [[] for _ in range(limits.num_stages)]
    for rank in range(limits.num_ranks):
        numbers = [i for i, m in enumerate(plan.micro_batches) if m.ranks == (rank,)]
        reach = reach_of(plan, [(i,) for i in numbers])
        places = backwards_of(reach)
        needs = list(accumulate((max(reach[place], place) + 1 for place in places), max))
        for stage, row in enumerate(order):
            own: list[Op] = []
            ahead, done = (limits.num_stages - 1 - stage) * each + most, 0
            for need, place in zip(needs, places, strict=True):
                end = min(len(numbers), need + ahead)
                own += [Op("F", i) for i in numbers[done:end]]
                done = max(done, end)
                own.append(Op("B", numbers[place]))
            if limits.splits_backward:
                own = _split(random, own)
            row += own
    return tuple(map(tuple, order))


def _split(random: np.random.Generator, row: list[Op]) -> list[Op]:
    share, last = float(random.choice([0.0, 0.5, 1.0])), random.random() < 0.5
    for op in [op for op in row if op.kind == "B" and random.random() < share]:
        at = len(row) if last else int(random.integers(row.index(op) + 1, len(row) + 1))
        row.insert(at, Op("W", op.micro_batch))
    return row
