"""In which order the chunks of a step run at each pipeline stage, and what is recomputed there (InfiniPipe).

InfiniPipe: Elastic Pipeline Parallelism, arXiv 2509.21275, sections III and IV. Choose chunks, an order of forwards and
backwards for every stage, and recomputed layers c_sk of every chunk k at every stage s, so that the step

    max_s  sum_k (F_sk + B_sk + c_sk R_sk) + waits_s        is least        [seconds]
    s.t.   sum_{k in flight at s} M_sk - c_sk S_sk  <=  room_s  at any time  [bytes]

A portfolio, judged by one simulator (`core.simulate.step`): the plan that came in, as it is and in an order of our own,
and chunkings by number of chunks (`chunks`); each in elastic order (`elastic`), with weight gradients as passes of
their own where the host can run them, and with recomputation where a stage would not hold it (`checkpointing`). Other
people's pipelines (`baselines`) are among the candidates too, so nothing slower than them is returned where they fit.
Recomputation only adds to a step, so what is slower without it than the best plan with it is left out.

Cost: one play of passes x stages a candidate; 512 sequences of Wikipedia with a tail up to 192K on 4 stages take 0.4 to
0.8 s of one core (benchmarks/pipeline.py). Not done: unlike numbers of layers a stage, interleaved (virtual) stages,
and a sequence on two ranks of the plane (`mesh` does that before; its micro-batches keep their order).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

from ...core.balance.bound import lower_bound_s
from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes
from ...core.errors import EvenloadError
from ...core.plan.limits import Limits
from ...core.plan.order import orders_of_stage
from ...core.plan.step_plan import StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from .baselines import BASELINES
from .checkpointing import DoesNotFitError, fitted
from .chunks import CHEAP, chunkings
from .config import GIB, PipelineConfig
from .elastic import ordered
from .judge import Judged, judged, keeping_all
from .remedies import refused
from .settings import breaks, limits_for, refuse_ranks_in_step
from .weights import placed

ALIKE = 0.005
"""Share of a step by which a plan may be behind the fastest for holding less."""
MEMORY_WORTH = 0.07
"""What a per cent less memory is worth among these, in per cent of the step: none is slower for next to nothing."""
FINALISTS = 3
"""Plans of least predicted time that get passes for their weight gradients; more while these have no more than `CHEAP`
chunks together."""
FILLED_BY_W = 0.6
"""Share of a plan's waits that these passes may fill: as far as that it may be behind the best and still get them."""


def plan(given: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """The batch of ``given`` in the fastest plan that fits. Raises EvenloadError where none does."""
    limits = limits_for(given, config)
    if limits.equal_counts:
        return _alone(given, context, config)
    over = max((max(tokens_of_ranks(m).values()) for m in (*given.micro_batches, *given.backward)), default=0)
    if over > limits.max_tokens:
        note = f"pipeline: a plan with {over} tokens on a rank is over max_tokens and left out ({given.made_by})"
        best = plan(StepPlan(given.lengths, (), given.limits), context, config)
        return best.revised(notes=(*best.notes, note))
    if given.micro_batches and limits.num_stages == 1:
        return _alone(given, context, config)
    found = _Portfolio(context, config, limits)
    found.keep(given)
    found.improve(given)
    found.keep_baselines(given)
    return found.best(given)


class _Portfolio:
    """Plans of one batch, judged."""

    def __init__(self, context: PlanningContext, config: PipelineConfig, limits: Limits) -> None:
        self._at, self._config, self._limits = context, config, limits
        self._found: list[Judged] = []
        self._problem: DoesNotFitError | None = None
        """Why a candidate could not be made to fit: of the one that lacks least."""
        self._bar_s = float("inf")
        """What the plan that came in and the baselines take where they fit: nothing slower is returned."""
        self._note = ""
        """What is to be said beside `_notes`."""
        self._splits = limits.splits_backward and config.split_backward != "off"

    def keep(self, given: StepPlan) -> None:
        """The plan that came in, if it has micro-batches; with as much recomputation as it needs."""
        if given.micro_batches:
            came = judged(replace(given, limits=self._limits), self._at)
            self._hold_to(came)
            if self._config.recompute == "auto" and (self._at.costs.recompute or not came.fits):
                self._add(judged(keeping_all(_explicit(came.plan), self._at, self._config), self._at))

    def keep_baselines(self, given: StepPlan) -> None:
        """Other people's plans under the same caps, as far as they are faster than what there is, and what the fastest
        could be besides."""
        bare = replace(given, limits=self._limits)
        for name, baseline in BASELINES.items():
            with suppress(EvenloadError):
                drafts = baseline.drafts(bare, self._at, self._config)
                under = (one for one in drafts if one.limits.max_tokens <= self._limits.max_tokens)
                allowed = (one for one in under if not breaks(one, self._config))
                best = baseline.best(allowed, self._at, self._config, self._least_s)
                if best is not None:
                    held = best._replace(plan=best.plan.revised(made_by=f"pipeline ({name})"))
                    self._hold_to(held)
                    if held.fits and held.step_s <= self._least_s:
                        self._refine(held)

    def _hold_to(self, judged: Judged) -> None:
        self._found.append(judged)
        if judged.fits:
            self._bar_s = min(self._bar_s, judged.step_s)

    def improve(self, given: StepPlan) -> None:
        """Candidates of our own, those first that are fastest where memory is left out, then variants of the best."""
        drafts = [draft for one in self._unordered(given) for draft in self._drafts(one)]
        fitting = []
        for draft in sorted(drafts, key=lambda one: one.step_s):
            if self._hope_s(draft) < self._least_s * (1 + ALIKE):
                fitting += self._add(draft)
        fitting.sort(key=self._hope_s)
        sums = accumulate(len(one.plan.micro_batches) for one in fitting)
        for place, (one, chunks) in enumerate(zip(fitting, sums, strict=True)):
            if place < FINALISTS or chunks <= CHEAP:
                self._refine(one)

    def _hope_s(self, draft: Judged) -> float:
        """What a plan may come to with passes for its weight gradients."""
        return draft.step_s * (1 - FILLED_BY_W * draft.bubble_frac) if self._splits else draft.step_s

    def _unordered(self, given: StepPlan) -> Iterator[StepPlan]:
        """Micro-batches of each rank in forward order, without an order of passes."""
        if given.micro_batches and not (given.backward or given.replayed or given.shared or given.offload):
            made_by = f"{given.made_by}, pipeline" if given.made_by else "pipeline"
            yield replace(given, order=(), recompute=(), limits=self._limits, made_by=made_by)
        try:
            yield from chunkings(given, self._limits, self._at, self._config)
        except EvenloadError as error:  # a sequence that must stay whole here; the plan that came in has it somehow
            if not given.micro_batches:
                raise
            self._note = f"pipeline: no chunks of its own: {error.what} ({error.found})"

    def _drafts(self, chunked: StepPlan) -> Iterator[Judged]:
        """In elastic order: stages run ahead as far as the settings let them, or as far as their memory does."""
        most, room = (
            self._config.max_extra,
            activation_budget_bytes(self._at.cluster, self._at.costs.memory, self._limits),
        )
        for cap_bytes in (math.inf, room):
            order = ordered(chunked, self._at, extra=most, cap_bytes=cap_bytes)
            draft = judged(keeping_all(order, self._at, self._config), self._at)
            yield draft
            if draft.fits:
                break

    def _add(self, draft: Judged) -> list[Judged]:
        """The draft, with recomputation where it needs that; nothing where that is not enough."""
        if not draft.fits and self._config.recompute == "auto":
            try:
                draft = judged(fitted(draft.plan, self._at, self._config, solver=False), self._at)
            except DoesNotFitError as problem:
                if self._problem is None or problem.missing_bytes < self._problem.missing_bytes:
                    self._problem = problem
                return []
        self._found.append(draft)
        return [draft] if draft.fits else []

    def _refine(self, found: Judged) -> None:
        """What a plan that fits could be besides: with less recomputation, with W passes."""
        if any(map(any, found.plan.recompute)) and found.step_s <= self._least_s:
            with suppress(EvenloadError):
                again = judged(fitted(found.plan, self._at, self._config), self._at)
                self._found.append(again)
                found = min(found, again, key=lambda one: one.step_s)
        if self._splits:
            self._found.append(judged(placed(found.plan, self._at), self._at))

    @property
    def _least_s(self) -> float:
        return min((one.step_s for one in self._found if one.fits), default=float("inf"))

    def best(self, given: StepPlan) -> StepPlan:
        """The fastest that fits, or one next to it that holds less. Raises EvenloadError."""
        fitting = [one for one in self._found if one.fits]
        if not fitting:
            raise refused(self._problem, given, self._at, self._config) if self._problem else self._too_large()
        limit_s = min(self._bar_s, self._least_s * (1 + ALIKE))
        alike = [one for one in fitting if one.step_s <= limit_s]
        best = min(alike, key=lambda one: one.step_s * max(1.0, one.held_bytes) ** MEMORY_WORTH).plan
        own = [self._note] if self._note else []
        return best.revised(notes=(*best.notes, *_notes(best), *own), bound_s=_bound_s(best, given, self._at))

    def _too_large(self) -> EvenloadError:
        least = min(self._found, key=lambda one: one.missing_bytes)
        return EvenloadError(
            "no order of the pipeline fits into memory",
            f"the best one is {least.missing_bytes / GIB:.3g} GiB over",
            "let layers be recomputed (plugins.pipeline.recompute=auto), or lower plugins.pipeline.max_tokens",
        )


def _bound_s(best: StepPlan, given: StepPlan, context: PlanningContext) -> float:
    """Of the plan that came in where its ranks share sequences, if it runs as it was; without recomputation else."""
    costs = context.costs
    if best.shared:
        return 0.0 if costs.recompute and best.recompute else given.bound_s
    lengths = best.lengths
    return lower_bound_s(lengths, best.limits, costs.kept() if costs.recompute else costs)


def _explicit(given: StepPlan) -> StepPlan:
    """With the host's own order written down, where the plan leaves it to the host and ranks share nothing.

    A shared micro-batch is in the lists of several ranks; a stage's order names it once.
    """
    if given.order or given.shared:
        return given
    stages = range(given.limits.num_stages)
    return replace(given, order=tuple(tuple(op for row in orders_of_stage(given, s) for op in row) for s in stages))


def _notes(best: StepPlan) -> list[str]:
    count, split = len(best.passes("B")), sum(map(len, best.split))
    notes = ["pipeline: one stage, nothing to order"] if best.limits.num_stages == 1 else []
    if split:
        of = count * best.limits.num_stages
        notes.append(f"pipeline: {split} of {of} backward passes leave their weight gradients to passes of their own")
    if any(map(any, best.recompute)):
        means = ", ".join(f"{sum(row) / len(row):.2g}" for row in best.recompute)
        notes.append(f"pipeline: recomputed layers a micro-batch, by stage: {means} of {best.limits.layers_per_stage}")
    return notes


def _alone(given: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """The plan that came in where there is no order to choose; with as much recomputation as it needs."""
    in_step = given.limits.equal_counts
    if not given.micro_batches:
        refuse_ranks_in_step(given.limits)
    note = f"pipeline: {'ranks run in step' if in_step else 'one stage'}, nothing to order"
    given = replace(given, limits=limits_for(given, config), notes=(*given.notes, note))
    again = context.costs.recompute
    if config.recompute == "off" or (not again and judged(given, context).fits):
        return given
    found = fitted(_explicit(given), context, config)
    return found.revised(bound_s=_bound_s(found, given, context)) if again and found.recompute else found
