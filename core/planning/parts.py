"""A large plane as equal parts: one of them is planned, and all run that plan, each on sequences like the planned ones.

In the order of length, P neighbours are *alike*, and each of the P parts of the ranks gets one of them. Planned are the
longest of those alike, so every part keeps the caps. What that wastes, parts that wait for the one of the longest, is
known beforehand:

    waste = P * sum of seconds of the longest / sum of seconds of all - 1

and the smallest part that wastes little enough is taken. A plan that shares a sequence among more ranks than a part has
is not found this way. O(S log S) in addition to planning a part.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..aliases import Ints, Ranks
from ..costs.context import PlanningContext
from ..plan.limits import Limits
from ..plan.order import PASS_KINDS
from ..plan.step_plan import Lengths, MicroBatch, Op, Slice, StepPlan, as_lengths

FEWEST_RANKS = 1024
"""Of a part; a plane of less than two is not divided."""
MOST_WASTE = 0.005
"""Share of a step that parts may wait for each other."""


class Parts(NamedTuple):
    """A batch and a plane, divided."""

    members: Ints
    """[P, K]: which sequence of the batch each part has in the place of a planned one."""
    lengths: Lengths
    """[K]: of the planned ones, in tokens."""
    ranks: int
    """Of a part."""

    def plane(self, limits: Limits, context: PlanningContext) -> tuple[Limits, PlanningContext]:
        """Limits and context of one part."""
        layout = replace(context.layout, dp=self.ranks // context.layout.cp)
        return replace(limits, num_ranks=self.ranks), replace(context, layout=layout)

    def joined(self, part: StepPlan, incoming: StepPlan, limits: Limits, block: int = 1) -> StepPlan | None:
        """The plan of a part for all of them; None where a shorter sequence is too short for its slices.

        ``block``: tokens of which slices begin at multiples.
        """
        forward, backward = list[MicroBatch](), list[MicroBatch]()
        for number, members in enumerate(self.members):
            cuts = _cuts(part, incoming.lengths[members], block)
            if cuts is None:
                return None
            own = members.tolist(), incoming.lengths[members].tolist(), cuts, number * self.ranks
            forward += [_placed(m, *own) for m in part.micro_batches]
            backward += [_placed(m, *own) for m in part.backward]
        count = len(self.members)
        size = {kind: len(part.passes(kind)) for kind in PASS_KINDS}
        steps = range(count)
        order = tuple(
            tuple(Op(kind, p * size[kind] + i) for p in steps for kind, i in of_stage) for of_stage in part.order
        )
        plan = incoming.with_micro_batches(forward, limits, part.made_by, order)
        return plan.revised(
            backward=tuple(backward),
            replayed=tuple(p * size["B"] + i for p in steps for i in part.replayed),
            recompute=tuple(row * count for row in part.recompute),
            offload=part.offload * count,
            notes=(*part.notes, f"one of {count} equal parts of {self.ranks} ranks was planned"),
        )


def parts_of(lengths: Ints, limits: Limits, context: PlanningContext) -> Parts | None:
    """The smallest parts that waste little; None for a small plane, or one whose ranks or stages wait for each other.

    lengths int64 [S].
    """
    node = limits.node_ranks or limits.num_ranks
    if limits.num_stages > 1 or limits.together > 1 or context.costs.beside:
        return None
    longest_first = np.argsort(-lengths, kind="stable")
    all_s = float(context.costs.sequence_s(lengths).sum())
    for ranks in range(FEWEST_RANKS, limits.num_ranks // 2 + 1):
        count = limits.num_ranks // ranks
        if limits.num_ranks % ranks or ranks % node or not len(lengths) or len(lengths) % count:
            continue
        alike = longest_first.reshape(-1, count)
        longest, shortest = lengths[alike[:, 0]], lengths[alike[:, -1]]
        if count * float(context.costs.sequence_s(longest).sum()) <= all_s * (1 + MOST_WASTE):
            alike[1::2] = alike[1::2, ::-1]
            # No shorter sequence is divided so unevenly among ranks that one has more tokens than of an odd number.
            odd = (longest > shortest) & (longest != limits.max_tokens)
            return Parts(alike.T, as_lengths(np.where(odd, longest | 1, longest)), ranks)
    return None


def _cuts(part: StepPlan, lengths: Ints, block: int) -> dict[int, dict[int, int]] | None:
    """Where sequences of these lengths are cut in the place of the planned ones: by these, by where those are."""
    planned = part.lengths.tolist()
    places: dict[int, set[int]] = {}
    for m in (*part.micro_batches, *part.backward):
        for s in m.slices:
            if s.sequence in part.cut:
                places.setdefault(s.sequence, {0}).add(s.stop)
    result = {}
    for k, stops in places.items():
        own, whole = int(lengths[k]), planned[k]
        cuts = {at: own if at == whole else at * own // whole // block * block for at in sorted(stops)}
        if any(end <= begin for begin, end in pairwise(cuts.values())):
            return None
        result[k] = cuts
    return result


def _placed(
    m: MicroBatch, members: list[int], lengths: list[int], cuts: dict[int, dict[int, int]], first: int
) -> MicroBatch:
    """A micro-batch of the planned part on the ranks from ``first`` on, with sequences of theirs."""

    def own(s: Slice) -> Slice:
        k = s.sequence
        return Slice(members[k], cuts[k][s.start], cuts[k][s.stop]) if k in cuts else Slice(members[k], 0, lengths[k])

    def shifted(ranks: Ranks) -> Ranks:
        return tuple(first + rank for rank in ranks)

    groups = tuple(map(shifted, m.cp_groups))
    return m._replace(slices=tuple(map(own, m.slices)), ranks=shifted(m.ranks), cp_groups=groups)
