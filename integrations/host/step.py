"""One planned step: which plans a host refuses before it runs anything, what passes are run with, where a rank stands,
and the one call of the executor.

A plan is refused that was made for another job, or has what the host has no passes for. The laws (`core.laws`) say what
no host can run; the tables here say what this one cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import refuse_first
from ...core.plan.action import Program
from ...core.plan.step_plan import Slice, StepPlan
from ...runtime.adapters.company import Company
from ...runtime.attention.labels import Labels
from ...runtime.attention.pack import TokensOf
from ...runtime.attention.sparse import SparsePass
from ...runtime.measure.busy import BusyClock
from ...runtime.stage.executor import Executor, StageTrainer, run_stages
from ...runtime.stage.stage_links import StageLinks
from ...runtime.world.plane import Plane
from .scoring import LossCollector

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
    collector: LossCollector | None = None
    """Takes down the losses of the sequences that are trained on; None: nobody asks for them."""
    company: Company | None = None
    """Whose sequences the step has on all replicas; None: the plan has them all."""
    sparse: SparsePass | None = None
    """What a pass without gradients leaves blocks of keys out by; None: attention is dense."""

    @property
    def labels_of_all(self) -> Labels | None:
        """The number of targets, and the weights, of the sequences on all replicas; `labels` where the plan has all."""
        company = self.company
        return Labels(self.tokens_of, company.targets, company.weights) if company else self.labels


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
    """Carry out what a rank with one stage does in a step; the slices that it ran."""
    return run_programs(plan, [(program, trainer, position)], clock, mark)


def run_programs(
    plan: StepPlan,
    parts: Sequence[tuple[Program, StageTrainer, Position]],
    clock: BusyClock,
    mark: Mark = no_mark,
) -> tuple[Slice, ...]:
    """Carry out what a rank does in a step at its stages, ascending; the slices that it ran at the last of them."""
    executors = [
        Executor(plan, stage, rank, program, trainer, links=links, plane=plane, clock=clock, mark=mark)
        for program, trainer, (stage, rank, links, plane) in parts
    ]
    run_stages(executors)
    return tuple(executors[-1].executed)


def refuse_foreign(
    plan: StepPlan,
    num_ranks: int,
    num_stages: int,
    *,
    host_schedule: bool = False,
    splits_backward: bool = True,
    v_shape: bool = False,
) -> None:
    """Raise EvenloadError for a plan that a host of so many dp_cp ranks and pipeline stages cannot run.

    Args:
        host_schedule: the trainer's own schedule will run it, which has no need of the plan's stages.
        splits_backward: the host runs weight gradients as passes of their own.
        v_shape: each device has two of the stages.
    """
    stages = num_stages if host_schedule else len(plan.order or plan.recompute) or plan.limits.num_stages
    grouped = (*plan.micro_batches, *plan.backward)
    static = next((i for i, m in enumerate(grouped) if len(m.ranks) > 1 and not m.cp_comm), None)
    layout = "plan for the layout of this job"
    refuse_first(
        (
            plan.limits.num_ranks != num_ranks,
            "the plan was made for another number of data-parallel ranks",
            f"a plan for {plan.limits.num_ranks} ranks, {num_ranks} in the job",
            layout,
        ),
        (
            stages != num_stages,
            "the plan was made for another number of pipeline stages",
            f"a plan for {stages} stages, {num_stages} in the job",
            layout,
        ),
        (
            bool(plan.merge) != v_shape,
            f"the plan does not say what runs on devices of {1 + v_shape} pipeline stages each",
            f"made by {plan.made_by or 'hand'}, for {1 + bool(plan.merge)}",
            "plan with the plugins.pipeline.v_shape of this job",
        ),
        (
            static is not None,
            "a shared micro-batch names no cp_comm: static context parallelism can be planned, not run",
            f"micro-batch {static}",
            "let plugins.mesh share sequences: it says how",
        ),
        (
            not splits_backward and any(plan.split),
            "this host computes weight gradients in its backwards",
            "a plan with weight gradients as passes of their own",
            "set plugins.pipeline.split_backward=off",
        ),
    )


def refuse_own_order(plan: StepPlan, rank: int, *, shares: bool) -> None:
    """Raise EvenloadError for a plan that the trainer's own schedule cannot run.

    Args:
        rank: of the dp_cp plane, whose micro-batches are to run.
        shares: there is a plane over which ranks share micro-batches, and one pipeline stage.
    """
    shared = next((i for i in plan.of_rank(rank) if len(plan.micro_batches[i].ranks) > 1), None)
    refuse_first(
        (
            bool(plan.order or plan.recompute or any(plan.offload)),
            "the trainer's own schedule cannot run a plan with an order, recomputation or offload of its own",
            f"made by {plan.made_by or 'hand'}",
            "let evenload's host run it, or plan with limits.whole_sequences and without plugins.pipeline",
        ),
        (
            not shares and shared is not None,
            "a micro-batch is shared by several ranks",
            f"micro-batch {shared}",
            "let evenload's host run it; without pipeline stages, give the Plane of open_plane()",
        ),
        (
            bool(plan.cut),
            "a sequence is cut into slices in a plan without an order",
            f"sequence {min(plan.cut, default=0)}",
            "give the plan an order per stage, or plan whole sequences",
        ),
    )
