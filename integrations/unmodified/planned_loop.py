"""The one seam of loops that nobody edits: a global batch in, the same plan on every rank out, and word of the step.

Under every loop is a `LoopSession`, to which the loop adds what its host makes different. Whatever that is, a batch is
planned here alone: on every rank, compared on all of them under the true number of the step before a token moves, and a
refusal of one rank is raised on all. Planning is in line: a loop hands its batches over when it trains them, not
before. So what a plan gains is weighed against what it takes (`SyncPlanning`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist

from ...core.errors import EvenloadError, RankError, RequestError
from ...core.plan.limits import Limits
from ...core.plan.step_plan import Lengths, StepPlan, as_lengths
from ...core.planning.chain import PlanChain
from ...core.planning.gains import stock_as_good
from ...core.planning.judge import outcome_of
from ...core.planning.notes import warn_once
from ...core.planning.stages import SyncPlanning
from ...core.planning.stock import packed_plan
from ...runtime.experts.history import learned
from ...runtime.world.agreement import agree, everyone, rank_and_size
from ...runtime.world.plane import Plane
from .planned_runs import report_idle, report_step

log = logging.getLogger("evenload")

Sample = TypeVar("Sample")


class Closable(Protocol):
    """Process groups with what they carry."""

    def close(self) -> None: ...


Group = TypeVar("Group", bound=Closable)
Session = TypeVar("Session", bound="LoopSession")

Place = tuple[int, int, int]
"""(rank, micro-batch of the rank, row of the micro-batch) of a sample."""

_NO_PLAN = bytes(16)
"""What a rank whose planner refuses the batch shows in place of a digest."""


@dataclass(frozen=True, eq=False)
class GlobalBatch(Generic[Sample]):
    """The samples that all ranks bring to a step, numbered micro-batch by micro-batch, rank by rank."""

    places: tuple[Place, ...]
    """Where the stock run has each sample."""
    lengths: Lengths
    own: Mapping[int, Sample]
    """What this rank has read, by number."""

    @classmethod
    def of(
        cls, lengths: Sequence[Sequence[Sequence[int]]], read: Sequence[Sequence[Sample]], rank: int
    ) -> GlobalBatch[Sample]:
        """The samples of these lengths.

        Args:
            lengths: tokens of each sample by rank, micro-batch and row; the same on all ranks.
            read: the samples of this rank, by micro-batch and row.
        """
        places = tuple(
            (other, place, row)
            for place in range(max(map(len, lengths)))
            for other, brought in enumerate(lengths)
            for row in range(len(brought[place]) if place < len(brought) else 0)
        )
        own = {i: read[place][row] for i, (other, place, row) in enumerate(places) if other == rank}
        return cls(places, as_lengths([lengths[other][place][row] for other, place, row in places]), own)

    @property
    def source(self) -> list[int]:
        """The rank that has read each sample."""
        return [rank for rank, _, _ in self.places]

    def packed(self, limits: Limits) -> StepPlan:
        """The step as the loop's own batches run it, whose rows hold samples side by side, without padding."""
        return packed_plan(self.lengths, [(place, rank) for rank, place, _ in self.places], limits)

    def is_even(self, num_ranks: int) -> bool:
        """Whether all samples are of one length and each rank brings as many: then the stock step pads none of them
        and no rank waits."""
        counts = [self.source.count(rank) for rank in range(num_ranks)]
        return len(set(self.lengths.tolist())) == 1 and len(set(counts)) == 1

    def numbers_of(self, rank: int, num_micro_batches: int) -> list[list[int]]:
        """The samples of each of a rank's own micro-batches."""
        numbers: list[list[int]] = [[] for _ in range(num_micro_batches)]
        for i, (other, place, _) in enumerate(self.places):
            if other == rank:
                numbers[place].append(i)
        return numbers


@dataclass(eq=False, kw_only=True)
class LoopSession:
    """A loop that nobody edits, from its first batch until evenload is off: what plans it, what has run and been said,
    the process groups that its ranks open, and what its host gets back. The same on all ranks."""

    name: str
    """What its users call the loop."""
    planners: PlanChain | None = None
    """With the costs of the live model; None as long as it is not known whether anything can be planned."""
    stays: bool = False
    """Its batches run as they are, this one and all later ones."""
    sync_planning: SyncPlanning = field(default_factory=SyncPlanning)
    steps: int = 0
    """How many steps have been planned."""
    warned: set[str] = field(default_factory=set)
    """Reasons of which rank 0 has warned."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Gives the host back what the loop has changed of it, and closes process groups."""
    _groups: dict[Callable[[], Any], Any] = field(default_factory=dict)
    """Process groups, by what opened them."""
    _began_s: float | None = None
    """When the last step began, by `time.perf_counter`."""
    _times_s: dict[str, float] = field(default_factory=dict)
    """Measured: ``plan_s`` of the last step, and ``step_s`` from the beginning of the one before to its own."""
    _ran: tuple[PlanChain, StepPlan] | None = None
    """What the last reported step ran by."""
    _last: tuple[PlanChain, StepPlan] | None = None
    """What the last batch was planned with, and its plan."""
    _stock: tuple[StepPlan, StepPlan | None] | None = None
    """A plan of even samples, and the stock plan where that is as good."""

    @property
    def chain(self) -> PlanChain:
        """The planners, where something can be planned."""
        assert self.planners is not None
        return self.planners

    @chain.setter
    def chain(self, chain: PlanChain) -> None:
        self.planners = chain

    def group(self, make: Callable[[], Group]) -> Group:
        """What ``make`` makes of process groups: once for the loop, and closed with it. Collective the first time."""
        if make not in self._groups:
            opened = self._groups[make] = make()
            self.undo.callback(lambda: opened.close() if dist.is_initialized() else None)
        group: Group = self._groups[make]
        return group

    def plane_of(self, plan: StepPlan, make: Callable[[], Plane]) -> Plane | None:
        """What the micro-batches of a plan are shared over; None where it shares none. Collective."""
        if not plan.shared:
            return None
        plane = self.group(make)
        plane.node_ranks = plan.limits.node_ranks
        return plane

    def tell(self) -> None:
        """Hand the `numbers` of a reported step to the tracker of the host, where that is not asked for them."""

    def close(self) -> None:
        """Give the host back what it had, whose batches run as they are from now on. Collective where process groups
        are open."""
        self.undo.close()
        self.stays, self._ran = True, None

    def leave(self, error: EvenloadError) -> None:
        """Say once that a batch runs as it is; every rank calls it.

        Raises EvenloadError where plans are required, and where nothing about the batch is wrong: a rank is missing or
        holds another plan, or the recipe cannot be followed.
        """
        if isinstance(error, (RankError, RequestError)):
            raise error
        why = f"{error.what} ({error.found})"
        if not self.has_run:
            report_idle(self.name, why, error.do)
        elif error.what not in self.warned and rank_and_size()[0] == 0:
            log.warning("a batch of %s runs as it is: %s; %s", self.name, why, error.do)
        if self.planners is not None:
            self.warned.add(error.what)

    def plan(self, lengths: Lengths, planner: Callable[[PlanChain, Lengths], StepPlan] | None = None) -> StepPlan:
        """The plan of the next step. Collective.

        Args:
            lengths: tokens of every sample of the global batch, the same on all ranks.
            planner: plans a batch by the chain; None: the chain itself does.

        Raises, on all ranks the same:
            RankError: ranks hold different plans, as they would by unlike recipes.
            EvenloadError: the planner of a rank refuses the batch.
        """
        self.steps += 1
        begin_s = time.perf_counter()
        self._times_s = {} if self._began_s is None else {"step_s": begin_s - self._began_s}
        self._began_s = begin_s
        refusal: EvenloadError | None = None
        try:
            plan = planner(self.chain, lengths) if planner else self._planned(lengths)
        except EvenloadError as error:
            refusal = error
        try:
            agree(_NO_PLAN if refusal else plan.digest, "plans", self.steps)
        except RankError as differ:
            raise next(filter(None, everyone(refusal)), differ) from None
        if refusal is not None:
            raise refusal
        if rank_and_size()[0] == 0:
            warn_once(plan, self.warned)
        self._times_s["plan_s"] = time.perf_counter() - begin_s
        return plan

    def plan_unless_even(self, batch: GlobalBatch[Any]) -> StepPlan | None:
        """`plan`; None where all samples are of one length and the stock step, which is reported then, is as good."""
        plan = self.plan(batch.lengths)
        if not batch.is_even(rank_and_size()[1]):
            return plan
        if self._stock is None or self._stock[0] is not plan:
            self._stock = plan, stock_as_good(self.chain, plan)
        if (stock := self._stock[1]) is None:
            return plan
        self.report(stock)
        return None

    @property
    def has_run(self) -> bool:
        """Whether a step has run by its plan."""
        return self._ran is not None

    @property
    def numbers(self) -> dict[str, float]:
        """What trackers get of the last reported step, by name: ``step_s`` and ``plan_s`` are measured on this rank
        (a step to the beginning of the next; none before the second), the rest is its plan's, predicted."""
        if self._ran is None:
            return {}
        chain, plan = self._ran
        outcome = outcome_of(plan, chain.context)
        predicted = {
            "predicted_s": outcome.step_s,
            "predicted_imbalance": outcome.imbalance,
            "predicted_bubble_frac": outcome.bubble_frac,
            "padding_frac": plan.padding_frac,
        }
        return {f"evenload/{name}": float(value) for name, value in (self._times_s | predicted).items()}

    def _planned(self, lengths: Lengths) -> StepPlan:
        """The plan of a batch, which is the last one's where lengths and costs are."""
        if self._last and self._last[0] is self.chain and np.array_equal(self._last[1].lengths, lengths):
            return self._last[1]
        plan = self.sync_planning.plan(self.chain, lengths)
        self._last = self.chain, plan
        return plan

    def report(
        self,
        plan: StepPlan,
        *,
        micro_batch_size: int | None = None,
        packed: StepPlan | None = None,
        loads: Sequence[Any] | None = None,
    ) -> None:
        """Leave word of a planned step, and learn from its loads of experts; `report_step` has the arguments.

        Collective where plans depend on loads.
        """
        report_step(self.name, self.chain, plan, micro_batch_size=micro_batch_size, packed=packed, loads=loads)
        self._ran = self.chain, plan
        self.tell()
        if loads is not None:
            self.chain = learned(self.chain, loads)


class Loops(WeakKeyDictionary[Any, Session]):
    """The sessions of one kind of loop, by what runs each in its host."""

    def release(self) -> None:
        """Close them all; for after the patch rows are off."""
        for session in list(self.values()):
            session.close()
        self.clear()
