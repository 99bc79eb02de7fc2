"""Micro-batches of all ranks at a time, in groups of ranks by need: Megatron's `default_dynamic_cp` as a baseline.

After what its DefaultDynamicCPScheduler says of itself (core/datasets/data_schedule.py on main; BalancedCPScheduler of
the wheels since 0.16 does the same without packing), in words:

    degree    as many ranks as the tokens of a sequence fill, up to a power of two; its work is tokens^2 / degree
    buckets   longest first, as many as there are degrees, cut where one holds 1.1 times its share of the work
    place     the first bucket's next sequence that has a place: a new group of free ranks, or else the group of its
              degree of least work that has room for its tokens
    stop      no place is left; or degrees have begun to fall and ranks are within 5 % of each other
    spread    while ranks are idle, the first of the smallest groups takes twice as many

Each group runs what it got as one pack. A sequence that needs more ranks than there are is on the most that a power of
two allows. O(K R) a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from ...core.aliases import Ints
from ...core.costs.context import PlanningContext
from ...core.plan.step_plan import MicroBatch, StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from .config import MeshConfig
from .cost_table import CpStrategy, cost_table_of
from .emit.micro_batches import common_strategy, whole
from .emit.step import limits_for, step

_OVER_SHARE = 1.1
_SLACK = 0.05


@dataclass
class _Group:
    """Neighbouring ranks and the sequences that they run as one pack."""

    degree: int
    items: list[int] = field(default_factory=list)
    work: float = 0.0
    """Of each rank, in tokens^2."""
    tokens: float = 0.0
    """Of each rank."""


def dynamic_cp(incoming: StepPlan, context: PlanningContext, config: MeshConfig) -> StepPlan:
    """The baseline: attention shared in the way that is predicted fastest, under a cap that holds what ranks get."""
    lengths, limits = incoming.lengths, limits_for(incoming, context, config)
    table = cost_table_of(context, limits, config, int(lengths.max(initial=1)))
    micro_batches = []
    for groups in rounds_of(lengths, limits.num_ranks, limits.max_tokens):
        for group, ranks in zip(groups, ranks_of(groups), strict=True):
            pack = tuple(whole(lengths, np.array(sorted(group.items))))
            if len(ranks) == 1:
                micro_batches.append(MicroBatch(pack, ranks))
                continue
            strategy = common_strategy([(s.length, ranks) for s in pack], table) or CpStrategy("ring")
            # Very short sequences leave ranks without a token, unless tokens are dealt anew.
            short = max(s.length for s in pack) < 2 * len(ranks)
            micro_batches.append(strategy.micro_batch(pack, ranks, remap=short))
    held = max((max(tokens_of_ranks(m).values()) for m in micro_batches), default=0)
    return step(incoming, replace(limits, max_tokens=max(limits.max_tokens, held)), micro_batches, "dynamic_cp")


def rounds_of(lengths: Ints, num_ranks: int, cap: int) -> list[list[_Group]]:
    """The micro-batches in launch order, each its groups from the first rank on. lengths int64 [K] in tokens."""
    tokens = lengths.tolist()
    left = sorted(range(len(tokens)), key=lambda i: -tokens[i])
    rounds = []
    while left:
        groups, left = next_round(left, tokens, num_ranks, cap)
        rounds.append(groups)
    return rounds


def next_round(
    items: list[int], tokens: list[int], num_ranks: int, cap: int, slack: float = _SLACK, held: float | None = None
) -> tuple[list[_Group], list[int]]:
    """The groups of the next micro-batch, and the sequences that are left, bucket by bucket.

    ``held``: tokens that a rank may hold of a pack; None: the cap.
    """
    most = 1 << (num_ranks.bit_length() - 1)
    degrees = {i: min(most, 1 << (-(-tokens[i] // cap) - 1).bit_length()) for i in items}
    work = {i: tokens[i] ** 2 / degrees[i] for i in items}
    buckets = _buckets(items, degrees, work)
    groups: list[_Group] = []
    first = degrees[items[0]]
    falling = False
    while buckets:
        free = num_ranks - sum(group.degree for group in groups)
        having = {group.degree for group in groups}
        bucket = next((b for b in buckets if b and (degrees[b[0]] in having or free >= degrees[b[0]])), None)
        if bucket is None:
            break
        item = bucket[0]
        degree = degrees[item]
        each = tokens[item] / degree
        open_ = [g for g in groups if g.degree == degree and g.tokens + each <= (cap if held is None else held)]
        if free >= degree:
            open_ = [_Group(degree)]
            groups += open_
        if not open_:
            break
        group = min(open_, key=lambda g: g.work)
        group.items.append(bucket.pop(0))
        group.work += work[item]
        group.tokens += each
        while buckets and not buckets[0]:
            buckets.pop(0)
        falling = falling or degree < first
        loads = [group.work for group in groups] + [0.0] * (sum(g.degree for g in groups) < num_ranks)
        if falling and buckets and max(loads) - min(loads) <= slack * max(loads):
            break
    while idle := num_ranks - sum(group.degree for group in groups):
        smallest = min(groups, key=lambda g: g.degree)
        smallest.degree += min(smallest.degree, idle)
    return groups, [item for bucket in buckets for item in bucket]


def ranks_of(groups: list[_Group]) -> list[tuple[int, ...]]:
    """The ranks of each group."""
    ends = accumulate(group.degree for group in groups)
    return [tuple(range(end - group.degree, end)) for end, group in zip(ends, groups, strict=True)]


def _buckets(items: list[int], degrees: dict[int, int], work: dict[int, float]) -> list[list[int]]:
    """Consecutive items of about equal work, as many as there are degrees."""
    count = len(set(degrees.values()))
    share = sum(work[i] for i in items) / count
    buckets: list[list[int]] = []
    own: list[int] = []
    own_work = 0.0
    for place, item in enumerate(items):
        # One less is to come with every bucket, and one less is left with it: the rule counts it twice.
        scarce = len(items) - place <= count - 2 * len(buckets)
        if own and (own_work + work[item] > share * _OVER_SHARE or scarce):
            buckets.append(own)
            own, own_work = [], 0.0
        own.append(item)
        own_work += work[item]
    return [*buckets, own]
