"""Sequences on single ranks dealt anew onto what each rank is simulated to take with the shared ones.

Candidates place sequences by prices; what traffic of shared ones nothing hides is known once a plan is played. Micro-
batches stay as they are but for which sequences they hold, under the token cap: one goes from the busiest rank to one
of the `_REACH` least busy, or two change places, the best first, while that helps. O(ranks) changes of some 50 us: 512
sequences on 64 ranks take 2 to 5 ms and up to 3 % less (benchmarks/results/mesh.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.costs.context import PlanningContext
from ....core.plan.step_plan import StepPlan
from ....core.planning.judge import outcome_of
from ..emit.micro_batches import whole

_REACH = 16
_MOVES = 4
"""Most changes for each rank."""
_GAIN = 1e-4
"""Of the busiest rank's seconds that a change saves at least."""


def levelled(plan: StepPlan, context: PlanningContext) -> Iterator[StepPlan]:
    """The plan of one stage with its unshared sequences levelled; none where nothing is to be gained."""
    outcome, num_ranks = outcome_of(plan, context), plan.limits.num_ranks
    loads = (outcome.busy_s + outcome.exposed_s)[0]
    alone = {n: m for n, m in enumerate(plan.micro_batches) if len(m.ranks) == 1 and m.slices and not m.pad_to}
    if plan.backward or plan.order or plan.cut or not alone or loads.max() <= (1 + _GAIN) * loads.mean():
        return
    ranks, sizes = (
        np.array(column) for column in zip(*((m.ranks[0], len(m.slices)) for m in alone.values()), strict=True)
    )
    items, slot = (
        np.array([s.sequence for m in alone.values() for s in m.slices]),
        np.repeat(np.arange(len(alone)), sizes),
    )
    seconds, tokens = context.costs.sequence_s(plan.lengths)[items], plan.lengths[items]
    free_tokens, before = plan.limits.max_tokens - np.bincount(slot, tokens).astype(np.int64), slot.copy()
    for _ in range(_MOVES * num_ranks):
        busiest = int(loads.argmax())
        out, idle = np.flatnonzero(ranks[slot] == busiest), np.zeros(num_ranks, dtype=np.bool_)
        idle[np.argsort(loads, kind="stable")[:_REACH]] = True
        idle[busiest] = False
        free_slots, back = np.flatnonzero(idle[ranks]), np.flatnonzero(idle[ranks[slot]])
        if not len(out) or not len(free_slots):
            break
        # A move is a change of places with nothing, for which every micro-batch is there.
        into = np.concatenate([free_slots, slot[back]])
        shift_s = seconds[out][:, None] - np.concatenate([np.zeros(len(free_slots)), seconds[back]])
        shift = tokens[out][:, None] - np.concatenate([np.zeros(len(free_slots), dtype=np.int64), tokens[back]])
        after = np.maximum(loads[busiest] - shift_s, loads[ranks[into]] + shift_s)
        after[(shift > free_tokens[into]) | (-shift > free_tokens[slot[out]][:, None])] = np.inf
        after[sizes[slot[out]] == 1, : len(free_slots)] = np.inf
        row, column = divmod(int(after.argmin()), len(into))
        if after[row, column] > (1 - _GAIN) * loads[busiest]:
            break
        source, target = slot[out[row]], into[column]
        slot[out[row]] = target
        if column < len(free_slots):
            sizes[[source, target]] += (-1, 1)
        else:
            slot[back[column - len(free_slots)]] = source
        for k, sign in ((source, -1), (target, 1)):
            free_tokens[k] -= sign * shift[row, column]
            loads[ranks[k]] += sign * shift_s[row, column]
    if (before != slot).any():
        dealt = list(plan.micro_batches)
        for k, (n, m) in enumerate(alone.items()):
            dealt[n] = m._replace(slices=tuple(whole(plan.lengths, np.sort(items[slot == k]))))
        yield plan.revised(micro_batches=tuple(dealt))
