"""Micro-batches as two halves that take turns, where that is predicted faster (DistCA's ping-pong, arXiv 2510.18121).

    pass of a half     compute c_h, traffic e_h that nothing inside it hides
    both one by one    c_1 + c_2 + e_1 + e_2
    in turns           c_1 + c_2 + e_1 + e_2 - (1 - k) h + first travel + a launch,  h = min(e_1, c_2) + min(e_2, c_1)

``k`` is what traffic takes from compute beside it (`core.costs.exposed`). The slices of each CP group are divided into
halves, whole ones where that is about as fast, else with one slice cut: its second part attends to the keys of its
first. So every rank has enough of both. What has too few tokens for that runs whole, as does what would gain nothing.
Linear in slices: 128 sequences on 16 ranks take some 20 ms (benchmarks/peers/halves.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ....core.costs.context import PlanningContext
from ....core.costs.costs import PassCost
from ....core.plan.step_plan import MicroBatch, Op, Slice, StepPlan
from ....core.plan.token_layout import tokens_of_ranks
from ....core.simulate.passes import PassTimes
from ..cost_table import LEAST_TOKENS

_LEVELS = 0.8, 0.55
"""Shares of its seconds that the larger half may have for no slice to be cut: unlike halves hide each other's traffic
as long as it takes less than the smaller one computes. The second is tried beside the first,"""
_CUT_GAINS = 0.01
"""and taken where it saves so much of a micro-batch: blocks over a prefix are slower than the kernels for packs."""


def in_turns(plan: StepPlan, context: PlanningContext) -> StepPlan | None:
    """The plan of one stage with halves wherever they are faster; None where they are nowhere."""
    if plan.backward or plan.replayed or any(plan.offload) or any(m.first_half for m in plan.micro_batches):
        return None
    chosen, now_s = list(plan.micro_batches), _seconds(plan.micro_batches, plan, context)
    for level, gain in zip(_LEVELS, (0.0, _CUT_GAINS), strict=True):
        halved = [_halved(m, context.costs.both, level) or m for m in plan.micro_batches]
        turns_s = _seconds(halved, plan, context)
        for i, m in enumerate(halved):
            if turns_s[i] < (1 - gain) * now_s[i]:
                chosen[i], now_s[i] = m, turns_s[i]
    faster, number = sum(m.first_half > 0 for m in chosen), range(len(chosen))
    if not faster:
        return None
    return plan.revised(
        micro_batches=tuple(chosen),
        order=plan.order or (tuple(Op(kind, i) for i in number for kind in ("F", "B")),),
        made_by="mesh (halves)",
        notes=(*plan.notes, f"mesh: {faster} of {len(number)} micro-batches run as halves that take turns"),
    )


def _seconds(micro_batches: Sequence[MicroBatch], plan: StepPlan, context: PlanningContext) -> list[float]:
    """What each of these micro-batches takes in place of the plan's, forward and backward [s]."""
    times = PassTimes(plan.revised(micro_batches=tuple(micro_batches)), context)
    return [sum(both) for both in zip(*times.whole_s(0), strict=True)]


def _halved(m: MicroBatch, price: PassCost, level: float) -> MicroBatch | None:
    """The micro-batch as two halves; None where some rank would have no token of one."""
    if m.remap or m.pad_to or m.round_to:
        return None
    groups: dict[tuple[int, ...], list[Slice]] = {}
    for ranks, piece in zip(m.ranks_of_slices, m.slices, strict=True):
        groups.setdefault(ranks, []).append(piece)
    parts = [(ranks, _in_two(slices, price, LEAST_TOKENS * len(ranks), level)) for ranks, slices in groups.items()]
    rows = [[(ranks, piece) for ranks, halves in parts for piece in halves[place]] for place in (0, 1)]
    if not all(rows):
        return None
    cp_groups, pieces = zip(*rows[0], *rows[1], strict=True)
    halved = m._replace(slices=pieces, cp_groups=cp_groups if m.cp_groups else (), first_half=len(rows[0]))
    return halved if all(min(tokens_of_ranks(half).values()) for half in halved.halves) else None


def _in_two(slices: Sequence[Slice], price: PassCost, least: int, level: float) -> tuple[list[Slice], list[Slice]]:
    """Halves of about equal seconds, the long slices first; of one slice the parts have ``least`` tokens or more."""
    seconds = {s: float(price.seconds(s.length, s.start)) for s in slices}
    ranked, total = sorted(slices, key=lambda s: -seconds[s]), sum(seconds.values())
    bins: tuple[list[Slice], list[Slice]] = ([], [])
    loads = [0.0, 0.0]
    for s in ranked:
        place = int(loads[1] < loads[0])
        bins[place].append(s)
        loads[place] += seconds[s]
    if max(loads) <= level * total:
        return bins
    left = total / 2
    for number, s in enumerate(ranked):
        if seconds[s] > left:
            taken = round(price.tokens_within(s.start, left) / least) * least
            taken = min(taken, s.length // least * least - least)
            if taken < least:
                return bins
            middle = s.start + taken
            return [*ranked[:number], s._replace(stop=middle)], [s._replace(start=middle), *ranked[number + 1 :]]
        left -= seconds[s]
    return bins
