"""What the ranks of a stage hold in each pass, as a function of the layers that are recomputed.

`core.costs.memory` is asked with no layer, one and all L layers of every micro-batch recomputed. What a pass holds is
linear in the layers c_i of those that wait for their backwards, and piecewise linear in c_j of its own, as the first
layer that runs again takes while it runs what it saved:

    held(c) = own(c_j) - sum_{i waits} save_i c_i       save_i      bytes a recomputed layer of micro-batch i saves
    own(0)      = level_0                               level_c     own part with c layers of j recomputed
    own(c >= 1) = max(level_1 - save_j (c - 1), level_L)

So the rows are those of the exact walk, whatever it counts. Nothing is held more where a layer more is recomputed;
hence passes that fit without any get no row, and no choice fits if all layers of all do not. A forward whose
activations wait needs no row: the pass after it holds at least as much.

What waits in host memory comes back for its backward. There a layer saves more of its own (level_1 less level_2), and
the first one may save less than it takes: `checkpointing` asks the walk in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...core.aliases import Floats, Ints
from ...core.costs.memory import levels_of_stage
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import Op, StepPlan

_MARGIN = 1e-9
"""Share of the memory that is left free, since sums of floats differ by the order of their terms."""


@dataclass(frozen=True)
class MemoryRows:
    """Passes that do not fit when nothing is recomputed: R rows, one column for each number of layers to be chosen."""

    saves: Floats
    """Bytes that a layer saves of those that wait, its own left out, float64 [R, columns]."""
    own: Ints
    """The column of the micro-batch that runs, int64 [R]; -1 where its own layers change nothing."""
    own_saves: Floats
    """Bytes that a layer more saves of it, float64 [R]."""
    levels: Floats
    """Bytes held with none, one and all of its own layers recomputed, and nothing of the others, float64 [3, R]."""
    budget_bytes: float
    """Bytes that may be held."""

    def held(self, layers: Ints) -> Floats:
        """Bytes held in each row, float64 [R], when so many layers of each column are recomputed, int64 [columns]."""
        return self.of_own(layers) - self.saves @ layers

    def of_own(self, layers: Ints) -> Floats:
        """What each row holds while none of the micro-batches that wait are recomputed."""
        own = np.where(self.own < 0, 0, layers[self.own])
        none, one, every = self.levels
        held: Floats = np.where(own > 0, np.maximum(one - self.own_saves * (own - 1), every), none)
        return held

    def fit(self, layers: Ints) -> bool:
        return bool((self.held(layers) <= self.budget_bytes).all())

    def on(self, columns: Ints, count: int) -> MemoryRows:
        """These rows with each column in another place, int64 [columns], of ``count`` in all."""
        saves = np.zeros((len(self.own), count))
        saves[:, columns] = self.saves
        return MemoryRows(
            saves, np.where(self.own < 0, -1, columns[self.own]), self.own_saves, self.levels, self.budget_bytes
        )


def joined(rows: Sequence[MemoryRows]) -> MemoryRows:
    """Rows over the same columns, one below the other."""
    saves, own, own_saves = (np.concatenate([getattr(r, n) for r in rows]) for n in ("saves", "own", "own_saves"))
    return MemoryRows(saves, own, own_saves, np.concatenate([r.levels for r in rows], axis=1), rows[0].budget_bytes)


class Most(NamedTuple):
    """The fullest pass of a plan."""

    held_bytes: float
    stage: int
    rank: int
    op: Op


class Probes:
    """What every pass of a plan holds when so many layers of every micro-batch are recomputed at every stage."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._known: dict[int, list[list[list[float]]]] = {}

    def plan_of(self, layers: int) -> StepPlan:
        """The plan with so many layers of every micro-batch whose activations wait, or all that a stage has."""
        plan, kept = self.plan, self.plan.kept
        most = (plan.limits.at(stage).layers_per_stage for stage in range(plan.limits.num_stages))
        counts = [min(layers, own) for own in most]
        numbers = range(len(plan.micro_batches))
        rows = {count: tuple(count if i in kept else 0 for i in numbers) for count in set(counts)}
        return plan.revised(recompute=tuple(rows[count] for count in counts))

    def levels(self, layers: int) -> list[list[list[float]]]:
        """Bytes by stage, rank and place in the rank's order."""
        if layers not in self._known:
            self._known[layers] = levels_of(self.plan_of(layers))
        return self._known[layers]

    def rows(self, stage: int, ranks: Sequence[int], columns: dict[int, int], budget_bytes: float) -> MemoryRows:
        """Rows of some ranks of a stage; ``columns`` gives the columns of their micro-batches."""
        budget_bytes *= 1.0 - _MARGIN
        rows = [row for rank in ranks for row in self._rows_of_rank(stage, rank, columns, budget_bytes)]
        return MemoryRows(
            np.array([row[0] for row in rows]).reshape(len(rows), len(columns)),
            np.array([row[1] for row in rows], dtype=np.int64),
            np.array([row[2] for row in rows], dtype=np.float64),
            np.array([row[3] for row in rows]).reshape(len(rows), 3).T,
            budget_bytes,
        )

    def _rows_of_rank(
        self, stage: int, rank: int, columns: dict[int, int], budget_bytes: float
    ) -> Iterator[tuple[Floats, int, float, tuple[float, float, float]]]:
        plan, layers = self.plan, self.plan.limits.at(stage).layers_per_stage
        ops = orders_of_stage(plan, stage)[rank]
        save, waits = np.zeros(len(columns)), np.zeros(len(columns))
        waiting = 0.0  # what a layer of all that wait saves
        probes = (0, 1, min(2, layers) if any(plan.offload) else 1, plan.limits.layers_per_stage)
        for op, none, one, two, every in zip(ops, *(self.levels(n)[stage][rank] for n in probes), strict=True):
            if op.kind == "F" and op.micro_batch in plan.kept:
                column = columns[op.micro_batch]
                save[column] = waits[column] = max(0.0, (none - every) / layers - waiting)
                waiting += save[column]
                continue
            number = plan.forward_of[op.micro_batch] if op.kind == "B" else None
            own = -1 if number is None else columns[number]
            if number is not None:
                waits[own] = 0.0
                waiting -= save[own]
            if none <= budget_bytes:
                continue
            if own < 0 or not save[own]:
                yield waits.copy(), -1, 0.0, (none, none, none)
            else:
                own_save = max(float(save[own]), one - two - waiting)
                yield waits.copy(), own, own_save, (none, one + waiting, every + layers * waiting)


def levels_of(plan: StepPlan) -> list[list[list[float]]]:
    """Bytes that are held in every pass, by stage, rank and place in the rank's order."""
    return [levels_of_stage(plan, stage) for stage in range(plan.limits.num_stages)]


def fullest(plan: StepPlan, levels: list[list[list[float]]]) -> Most:
    """The stage, rank and pass where most bytes are held."""
    most = Most(0.0, 0, 0, Op("F", 0))
    for stage, ranks in enumerate(levels):
        for rank, row in enumerate(ranks):
            held_bytes = max(row, default=0.0)
            if held_bytes > most.held_bytes:
                most = Most(held_bytes, stage, rank, orders_of_stage(plan, stage)[rank][row.index(held_bytes)])
    return most
