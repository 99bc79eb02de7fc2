"""Pipelines as games: parts of a model on ranks, what their passes take and hold, and orders of them.

A rank has one part of the model (1F1B, zero bubble) or two: the second is part P + r of interleaved schedules, and part
2P - 1 - r where they form a V (ZBV, DualPipeV). Orders are those of the installed torch
(`torch.distributed.pipelining`) or written here after their papers: 1F1B, where torch's `get_schedule_ops` names wrong
micro-batches at the last stage, and ZB-H1 and ZB-H2, of which torch has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from evenload.core.costs.context import PlanningContext
from evenload.core.plan.step_plan import StepPlan
from evenload.plugins.pipeline.clock import clock_of

KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}

Pass = tuple[str, int, int]
"""Kind (F, W; I: a backward without its weight gradients, B: with them), part of the model, micro-batch."""
Rows = list[list[list[Pass]]]
"""By rank; the passes of one entry run one after the other."""
Table = list[list[float]]
"""By part and micro-batch."""


class Game(NamedTuple):
    """What passes take [s] and hold [bytes]."""

    ranks: list[int]
    """Of the parts."""
    forward: Table
    inputs: Table
    """A backward without its weight gradients."""
    weights: Table
    up: Table
    """From the end of a forward to its arrival at the next part."""
    down: Table
    """From the end of a backward to its arrival at the part before; row p is that of part p + 1."""
    kept: Table
    """From forward to backward."""
    deferred: Table
    """From a backward without its weight gradients to its W."""

    def seconds(self, one: Pass) -> float:
        kind, part, number = one
        if kind == "B":
            return self.inputs[part][number] + self.weights[part][number]
        return {"F": self.forward, "I": self.inputs, "W": self.weights}[kind][part][number]

    def change(self, one: Pass) -> float:
        """What more a rank holds after a pass."""
        kind, part, number = one
        kept, deferred = self.kept[part][number], self.deferred[part][number]
        return {"F": kept, "B": -kept, "I": deferred - kept, "W": -deferred}[kind]


def game_of(plan: StepPlan, context: PlanningContext, ranks: list[int]) -> Game:
    """The micro-batches of a plan of one plane rank, on parts at these ranks, of equally many layers.

    The embedding's traffic is at the first part, the output layer at the last; every part has a launch of its own.
    """
    clock, memory, last = clock_of(plan, context), plan.limits.memory, len(ranks) - 1
    parts, middle = len(ranks) // plan.limits.num_stages, min(1, plan.limits.num_stages - 1)

    def split(table: Sequence[Sequence[float]], launch_s: float) -> Table:
        each = [(s - launch_s) / parts + launch_s for s in table[middle]]
        rows = [list(each) for _ in ranks]
        for part, stage in ((0, 0), (last, -1)):
            for j, (own, mean) in enumerate(zip(table[stage], table[middle], strict=True)):
                rows[part][j] += max(0.0, own - mean) if part else own - mean
        return rows

    forward = split(clock.forward, context.costs.forward.launch_s)
    weights = [[s / parts for s in clock.weights[0]] for _ in ranks]
    backward = split(clock.backward, context.costs.backward.launch_s)
    inputs = [[b - w for b, w in zip(*pair, strict=True)] for pair in zip(backward, weights, strict=True)]

    def travel(table: Sequence[Sequence[float]]) -> Table:
        none = [0.0] * len(plan.micro_batches)
        return [none if a == b else list(table[min(a, b, len(table) - 1)]) for a, b in pairwise(ranks)]

    slots = plan.slots["F"]
    stored = [
        slots[j] * memory.activation_bytes_per_token
        + sum(s.stop - s.start for s in m.slices if s.sequence in plan.cut) * memory.kv_bytes_per_token
        for j, m in enumerate(plan.micro_batches)
    ]
    head = [memory.head_bytes_per_token * n for n in slots]
    kept = [
        [n / parts + (h if part == last else 0.0) for n, h in zip(stored, head, strict=True)]
        for part in range(last + 1)
    ]
    deferred = [[n * memory.deferred_bytes_per_token / parts for n in slots] for _ in ranks]
    return Game(ranks, forward, inputs, weights, travel(clock.up), travel(clock.down), kept, deferred)


def of_torch(name: str, stages: int, count: int) -> Rows:
    """The passes of every rank by torch's own schedule."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    def passes(action: Any) -> list[Pass]:
        each = getattr(action, "sub_actions", None) or (action,)
        named = [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in each]
        return [(KINDS[kind], part, number) for kind, part, number in named if kind in KINDS]

    rows = get_schedule_ops(name, stages, count)
    return [[entry for action in row if action is not None and (entry := passes(action))] for row in rows]


def one_forward_one_backward(stages: int, count: int) -> Rows:
    """1F1B: a stage that is ``a`` stages before the last runs so many forwards ahead of its first backward."""
    return [_turns(stage, count, stages - 1 - stage, "B") for stage in range(stages)]


def zero_bubble(stages: int, count: int, times: int) -> Rows:
    """The schedules of Qi et al. (arXiv 2401.10241, section 2): ZB-H1 (ZB-1p) with ``times`` 1, ZB-H2 (ZB-2p) with 2.

    A stage runs so many times as far ahead as in 1F1B, and its W lag its backwards by as many as the first stage
    has more forwards in flight.
    """
    rows = []
    for stage in range(stages):
        lag, row = times * stage, []
        for (one,) in _turns(stage, count, times * (stages - 1 - stage), "I"):
            row += [[one], [("W", stage, one[2] - lag)]] if one[0] == "I" and one[2] >= lag else [[one]]
        rows.append([*row, *([("W", stage, j)] for j in range(max(0, count - lag), count))])
    return rows


def _turns(part: int, count: int, ahead: int, backward: str) -> list[list[Pass]]:
    forwards, backwards = ([(kind, part, j) for j in range(count)] for kind in ("F", backward))
    ahead = min(ahead, count)
    turns = zip([*forwards[ahead:], *[None] * ahead], backwards, strict=True)
    return [*([one] for one in forwards[:ahead]), *([one] for turn in turns for one in turn if one)]


def played(rows: Rows, game: Game) -> tuple[float, float]:
    """When the last rank ends [s], and the most that any holds [bytes]."""
    last = len(game.ranks) - 1
    done: dict[Pass, float] = {}
    at, now, held, most = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows), 0.0
    left = sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                entry = row[at[rank]]
                own = {_finished(one) for one in entry}
                needs = {need: late for one in entry for need, late in _needs(one, game, last) if need not in own}
                if not needs.keys() <= done.keys():
                    break
                now[rank] = max([now[rank], *(done[need] + late for need, late in needs.items())])
                for one in entry:
                    now[rank] += game.seconds(one)
                    done[_finished(one)] = now[rank]
                    held[rank] += game.change(one)
                    most = max(most, held[rank])
                at[rank], left = at[rank] + 1, left - 1
        assert left < before, "a schedule that stops"
    return max(now), most


def _needs(one: Pass, game: Game, last: int) -> Iterator[tuple[Pass, float]]:
    kind, part, number = one
    if kind == "F" and part:
        yield ("F", part - 1, number), game.up[part - 1][number]
    if kind in "IB":
        yield ("F", part, number), 0.0
        if part < last:
            yield ("I", part + 1, number), game.down[part][number]
    if kind == "W":
        yield ("I", part, number), 0.0


def _finished(one: Pass) -> Pass:
    return ("I", *one[1:]) if one[0] == "B" else one
