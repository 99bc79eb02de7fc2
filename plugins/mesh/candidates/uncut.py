"""The plans that `plan` chooses from where no sequence is cut: hybrid DP, and the best division into rounds found.

A division is judged by the sequences as they are placed, which agrees with the simulator to a per mille; simulating
each would take longer than placing it. In the best one, rounds in which ranks are left waiting are tried as disjoint
groups too (FlexSP's problem, `groups`): groups split all of their sequences alike, which levels a few long ones better;
overlapping CP groups level the others. Rounds in which sequences find no room are tried with moved tokens (`remapped`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ....core.aliases import Ints, Ranks
from ....core.costs.exposed import exposed_of_ranks
from ....core.plan.limits import Limits
from ....core.plan.step_plan import MicroBatch, StepPlan
from ..assign import Frame, placed, target_of
from ..config import MeshConfig
from ..cost_table import CostTable, SequenceCosts
from ..emit.blocks import Block, in_blocks
from ..emit.micro_batches import micro_batches, whole
from ..emit.step import step
from .disjoint_groups import Table, groups_of, seconds_of
from .hybrid_dp import hybrid_dp
from .remap import remapped
from .rounds import divisions, step_seconds

_LEVEL = 1.004
"""Time of a round over its target at which groups are not tried."""


_TRIES = 5
"""Further divisions that are placed for each unit of effort,"""
_SEQUENCES = 4096
"""fewer where this many sequences would be placed."""


class _Round(NamedTuple):
    numbers: Ints
    cp_groups: list[Ranks]
    seconds: float
    even: MicroBatch | None = None
    """The round with moved tokens, for want of room."""


def uncut(
    incoming: StepPlan, limits: Limits, cost_table: CostTable, anywhere: SequenceCosts, config: MeshConfig
) -> Iterator[StepPlan]:
    """Plans of the batch; ``anywhere`` is what its sequences cost, whatever the token cap."""
    lengths, shares = incoming.lengths, anywhere.under(limits.max_tokens)
    micro_batches = hybrid_dp(lengths, cost_table, shares, limits.max_tokens)
    if micro_batches is not None:
        yield step(incoming, limits, micro_batches, "mesh (hybrid DP)")
    rounds = _rounds(lengths, limits, cost_table, anywhere, config)
    if rounds and limits.num_stages > 1:
        # In an order of the plan's own no stage waits until what it sends has arrived.
        yield in_blocks(incoming, limits, [Block([one]) for one in rounds], "mesh (rounds)")
    traffic = cost_table.context.traffic
    if rounds and (limits.num_stages == 1 or traffic.waits_for_sends or traffic.overlap_gradients):
        yield step(incoming, limits, [m for one in rounds for m in one], "mesh (rounds)")


def _rounds(
    lengths: Ints, limits: Limits, cost_table: CostTable, anywhere: SequenceCosts, config: MeshConfig
) -> list[list[MicroBatch]]:
    """The micro-batches of each round of the best division; nothing where none was found."""
    shares, frame = anywhere.under(limits.max_tokens), Frame(limits.num_ranks, cost_table.node, limits.max_tokens)
    dummies = limits.together > 1 or limits.num_stages > 1
    rounds: list[list[MicroBatch]] = []
    for one in _best_rounds(lengths, limits, cost_table, anywhere, config):
        micro_batches = _launched(lengths, one, shares, cost_table, frame, dummies=dummies)
        if micro_batches is None:
            return []
        rounds.append(micro_batches)
    return rounds


def _best_rounds(
    lengths: Ints, limits: Limits, cost_table: CostTable, anywhere: SequenceCosts, config: MeshConfig
) -> list[_Round]:
    """The division that is fastest once its sequences are placed."""
    stages, launch_s = limits.num_stages, cost_table.launch_s
    frame, shares = Frame(limits.num_ranks, cost_table.node, limits.max_tokens), anywhere.under(limits.max_tokens)
    best_s, best = np.inf, list[_Round]()
    tries = config.effort * max(1, min(_TRIES, _SEQUENCES // len(lengths)))
    for tried, division in enumerate(divisions(lengths, shares, frame, launch_s, stages)):
        if tried > tries or division.seconds >= best_s:
            break
        rounds: list[_Round] = []
        for numbers in division.rounds:
            one = placed(shares, numbers, frame)
            if one is not None:
                rounds.append(_Round(numbers, one.cp_groups, one.seconds))
                continue
            even = remapped(lengths, numbers, anywhere, cost_table) if config.remap == "auto" else None
            if even is None:
                break
            rounds.append(_Round(numbers, [], _seconds([even], cost_table) - launch_s, even))
        else:
            seconds = step_seconds([one.seconds for one in rounds], launch_s, stages)
            if seconds < best_s:
                best_s, best = seconds, rounds
    return best


def _in_groups(lengths: Ints, one: _Round, shares: SequenceCosts, frame: Frame) -> _Round | None:
    """The round in disjoint groups; None where there are none, or it is level already."""
    if one.seconds <= _LEVEL * target_of(shares, one.numbers, frame.num_ranks, 1.0):
        return None
    table = Table(shares.degrees, shares.seconds[one.numbers])
    groups = groups_of(lengths[one.numbers], table, frame.num_ranks, frame.cap, frame.node)
    if groups is None or float(seconds_of(groups, table).max()) >= one.seconds:
        return None
    cp_groups: list[Ranks] = [()] * len(one.numbers)
    for group in groups:
        for k in group.sequences:
            cp_groups[k] = group.ranks
    return one._replace(cp_groups=cp_groups)


def _launched(
    lengths: Ints, one: _Round, shares: SequenceCosts, cost_table: CostTable, frame: Frame, *, dummies: bool
) -> list[MicroBatch] | None:
    """Micro-batches of a round, as overlapping CP groups or in groups; None where no cp_comm suits sequences that
    meet."""
    pieces = whole(lengths, one.numbers)
    if one.even is not None:
        return [one.even]
    forms = [micro_batches(pieces, one.cp_groups, cost_table, dummies=dummies)]
    if (grouped := _in_groups(lengths, one, shares, frame)) is not None:
        forms.append(micro_batches(pieces, grouped.cp_groups, cost_table, dummies=dummies))
    lawful = [rows for rows in forms if rows is not None]
    return min(lawful, key=lambda rows: _seconds(rows, cost_table)) if len(lawful) > 1 else next(iter(lawful), None)


def _seconds(micro_batches: list[MicroBatch], cost_table: CostTable) -> float:
    """Seconds of the slowest forward and the slowest backward of a round together, launches included."""
    at, slowest = cost_table.context, [0.0, 0.0]
    for m in micro_batches:
        for k, (own, passes) in enumerate(zip(at.costs.rank_s(m), (1, 2), strict=True)):
            for direction in cost_table.directions(passes):
                own = own + exposed_of_ranks(at, direction, m)
            slowest[k] = max(slowest[k], float(own.max()))
    return sum(slowest)
