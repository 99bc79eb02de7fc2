"""Random lawful plans in which ranks share micro-batches, as JSON takes them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths


def plan_of(lengths, rows, num_ranks, heads=0, node_ranks=0, order=None) -> StepPlan:
    """The plan of `micro_batch` rows; without an order all forwards, then all backwards. Raises PlanError."""
    micro_batches = tuple(
        MicroBatch(
            **{
                **row,
                "slices": tuple(Slice(*s) for s in row["slices"]),
                "ranks": tuple(row["ranks"]),
                "cp_groups": tuple(map(tuple, row.get("cp_groups", ()))),
            }
        )
        for row in rows
    )
    count = len(rows)
    ops = order or [*(("F", i) for i in range(count)), *(("B", i) for i in reversed(range(count)))]
    limits = Limits(num_ranks, 10_000, heads=heads, node_ranks=node_ranks)
    return check(StepPlan(as_lengths(lengths), micro_batches, limits, (tuple(Op(*op) for op in ops),)))


def micro_batch(slices, ranks, cp_comm="ring", **more) -> dict[str, Any]:
    return {"slices": slices, "ranks": ranks, "cp_comm": cp_comm if len(ranks) > 1 else "", **more}


def drawn(seed: int, num_ranks: int) -> list[Any]:
    """lengths, rows, ranks, heads, ranks of a node and order of a plan: what `plan_of` takes, heads both kinds."""
    chance = random.Random(seed)
    while True:
        made = _drawn(chance, num_ranks)
        try:
            lengths, rows, _, heads, node_ranks, order = made
            plan_of(lengths, rows, num_ranks, heads[0], node_ranks, order)
        except PlanError:
            continue
        if any(len(row["ranks"]) > 1 for row in rows):
            return made


def _drawn(chance: random.Random, num_ranks: int) -> list[Any]:
    heads = chance.choice([[8, 2], [4, 4], [6, 3], [5, 1]])
    node_ranks = chance.choice([0, 2])
    lengths = [chance.randint(1, 60) for _ in range(chance.randint(1, 5))]
    cuts = [sorted({0, n, *(chance.randrange(n) for _ in range(chance.choice([0, 0, 1, 2])))}) for n in lengths]
    waiting = [[[i, a, b] for a, b in pairwise(borders)] for i, borders in enumerate(cuts)]
    cp_comm = chance.choice(["ring", "all_gather", "all_to_all", "hybrid"])
    ulysses_degree = 2 if cp_comm == "hybrid" else 0
    cp_groups: dict[int, list[int]] = {}
    rows = []
    while any(waiting):
        ready = [i for i, chain in enumerate(waiting) if chain]
        chosen = chance.sample(ready, chance.randint(1, len(ready)))
        for i in chosen:
            cp_groups[i] = _grown(chance, cp_groups.get(i, []), num_ranks, cp_comm)
        ranks = sorted({rank for i in chosen for rank in cp_groups[i]})
        chance.shuffle(ranks)
        slices = [waiting[i].pop(0) for i in chosen]
        if len(ranks) == 1:
            rows.append(micro_batch(slices, ranks))
            continue
        more = {"remap": chance.random() < 0.3, "routed": chance.random() < 0.3, "ulysses_degree": ulysses_degree}
        rows.append(micro_batch(slices, ranks, cp_comm, cp_groups=[cp_groups[i] for i in chosen], **more))
    return [lengths, rows, num_ranks, heads, node_ranks, _order(chance, rows, lengths)]


def _grown(chance: random.Random, cp_group: list[int], num_ranks: int, cp_comm: str) -> list[int]:
    others = [rank for rank in range(num_ranks) if rank not in cp_group]
    if cp_group and cp_comm in ("all_to_all", "hybrid"):
        return cp_group
    count = chance.randint(0, len(others)) if cp_group else chance.randint(1, len(others))
    if cp_comm == "hybrid" and count > 1:
        count -= count % 2
    grown = [*cp_group, *chance.sample(others, count)]
    chance.shuffle(grown)
    return grown


def _order(chance: random.Random, rows: list[dict[str, Any]], lengths: list[int]) -> list[tuple[str, int]]:
    """Micro-batches of whole sequences may run backward at once."""
    ops, late = [], []
    for index, row in enumerate(rows):
        ops.append(("F", index))
        whole = all(b - a == lengths[i] for i, a, b in row["slices"])
        if whole and chance.random() < 0.5:
            ops.append(("B", index))
        else:
            late.append(("B", index))
    return [*ops, *reversed(late)]
