"""Lawful plans for ranks that share experts: in every group of them the k-th passes are of one kind."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths

_spec = importlib.util.spec_from_file_location("slice_plans", Path(__file__).with_name("slice_plans.py"))
slices = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slices)
tokens_of = slices.tokens_of


def named(name: str, ranks: int, ep: int) -> StepPlan:
    """``groups 7``: see `in_groups`; else a plan of slice_plans: ``chains some``, ``random 7``."""
    kind, *words = name.split()
    if kind == "groups":
        return in_groups(int(words[0]), ranks, ep)
    if kind == "random":
        return slices.random_plan(int(words[0]), ranks)
    return getattr(slices, kind)(*words[:1], **dict.fromkeys(words[1:], True))


def in_groups(seed: int, ranks: int, ep: int) -> StepPlan:
    """Packs, slices and replays; the ranks of a group have equally many, one may have dummies, other groups more."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, rng.randint(2, 20), rng.randint(20, 60))) for _ in range(3 * ranks)]
    rows: list[Any] = []
    for rank in range(ranks):
        own = [i for i in range(len(lengths)) if i % ranks == rank]
        rows.append(slices._groups(lengths, own, rng))
    replays: list[set[int]] = []
    for first in range(0, ranks, ep):
        group = rows[first : first + ep]
        longest = max(map(len, group))
        for row in group:
            row += [[] for _ in range(longest - len(row))]
        chosen = {k for k in range(longest) if rng.random() < 0.4 and all(row[k] for row in group)}
        replays += [chosen] * ep
    packs = tuple(MicroBatch(tuple(pack), (rank,)) for rank, row in enumerate(rows) for pack in row)
    starts = [sum(map(len, rows[:rank])) for rank in range(ranks)]
    again = tuple(sorted(starts[rank] + k for rank in range(ranks) for k in replays[rank]))
    order: list[Op] = []
    for rank, row in enumerate(rows):
        numbers = range(starts[rank], starts[rank] + len(row))
        order += [Op("F", i) for i in numbers] + [Op("B", i) for i in reversed(numbers)]
    limits = Limits(ranks, 10**6, in_step=ep)
    return check(StepPlan(as_lengths(lengths), packs, limits, (tuple(order),), replayed=again))
