"""One planned step: what its passes are run with, where a rank stands in it, and the one call of the executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...core.plan.action import Program
from ...core.plan.step_plan import Slice, StepPlan
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.measure.busy import BusyClock
from ...runtime.stage.executor import Executor, StageTrainer
from ...runtime.stage.stage_links import StageLinks
from ...runtime.world.plane import Plane

Mark = Callable[[str], None]
"""Tells the watchdog where this rank is."""


def no_mark(_: str) -> None:
    """A `Mark` that tells nobody."""


@dataclass(frozen=True, eq=False)
class Step:
    """What a host runs a plan with."""

    plan: StepPlan
    tokens_of: TokensOf
    labels: Labels | None
    """Which tokens are targets; None: each but the first of a sequence."""
    mark: Mark
    clock: BusyClock


class Position(NamedTuple):
    """Where a rank stands in a plan, and by what it reaches other ranks."""

    stage: int
    rank: int
    """Among the ranks of the stage, as the plan counts them."""
    links: StageLinks | None = None
    """To the neighbouring stages; None where there is one stage."""
    plane: Plane | None = None
    """What ranks share micro-batches over; None where the plan shares none."""


def run_program(
    plan: StepPlan,
    program: Program,
    trainer: StageTrainer,
    position: Position,
    clock: BusyClock,
    mark: Mark = no_mark,
) -> tuple[Slice, ...]:
    """Carry out what a rank does in a step; the slices that it ran."""
    stage, rank, links, plane = position
    executor = Executor(plan, stage, rank, program, trainer, links=links, plane=plane, clock=clock, mark=mark)
    executor.run()
    return tuple(executor.executed)
