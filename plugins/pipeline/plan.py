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
0.8 s of one core (benchmarks/planning/pipeline.py). Not done: interleaved (virtual) stages, and a
sequence on two ranks of the plane: `mesh` does that before. What it shares stays on its ranks, in slices and an order
of our own, and all others are dealt again around it (`chunks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from ...core.costs.context import PlanningContext
from ...core.errors import EvenloadError
from ...core.input.format import GIB
from ...core.plan.limits import Limits
from ...core.plan.order import orders_of_stage
from ...core.plan.rounds import in_rounds
from ...core.plan.step_plan import StepPlan
from ...core.plan.token_layout import tokens_of_ranks
from ...core.planning.judge import FASTEST, Candidate, Preference, beside, best, budget_bytes, judge
from ...core.simulate.step import after_passes_s
from ...core.simulate.v_shape import merged
from .baselines import BASELINES
from .checkpointing import DoesNotFitError, fitted, keeping_all
from .chunks import chunkings, least_s
from .config import PipelineConfig
from .elastic import ordered
from .opening import opened, saved_s
from .remedies import refused
from .settings import limits_for, refuse_ranks_in_step
from .v_shape import fastest as fastest_in_v
from .weights import SLACK, Placing, worth

SMALLER = Preference(slack=SLACK, key=lambda one: worth(one.step_s, one.peak_bytes))
"""A plan may be slower than the fastest for holding less."""
FINALISTS = 2
"""Plans of least predicted time, W passes placed, that are simulated; so are those to be made to fit."""
OPENED = 2
"""Chunkings that are weighed with small chunks first as well: those of least time, less what that may save."""
PLAYED = 1 << 10
"""Chunks times stages up to which orders of these are found by playing stages against each other: half a per cent."""
FEW = 48
"""Chunks of a plan up to which a second one of `EXTRAS` is weighed: with few, it matters most."""
EXTRAS = (4, 2, 1)
"""How far stages may run ahead, as far as the settings let them: the first of all chunkings, the others of finalists.
With more than `DEEP` stages the second comes first: there a stage is already many forwards ahead."""
DEEP = 8


def plan(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """The batch of the incoming plan in the fastest plan that fits. Raises EvenloadError where none does."""
    limits = limits_for(incoming, config)
    if limits.all_in_step:
        return _alone(incoming, context, config)
    over = max((max(tokens_of_ranks(m).values()) for m in (*incoming.micro_batches, *incoming.backward)), default=0)
    if over > limits.max_tokens:
        note = f"pipeline: a plan with {over} tokens on a rank is over max_tokens and left out ({incoming.made_by})"
        other = plan(StepPlan(incoming.lengths, (), incoming.limits), context, config)
        return other.revised(notes=(*other.notes, note))
    if incoming.micro_batches and limits.num_stages == 1:
        return _alone(incoming, context, config)
    portfolio = _Portfolio(context, config, limits)
    portfolio.keep(incoming)
    (portfolio.improve_in_v if limits.v_shape else portfolio.improve)(incoming)
    portfolio.keep_baselines(incoming)
    return portfolio.best(incoming)


class _Portfolio:
    def __init__(self, context: PlanningContext, config: PipelineConfig, limits: Limits) -> None:
        self._context = context
        self._config = config
        self._limits = limits
        self._candidates: list[Candidate] = []
        self._problem: DoesNotFitError | None = None
        """Why a candidate could not be made to fit: of the one that lacks least."""
        self._note = ""
        """What is to be said besides `_notes`."""
        self._splits = limits.splits_backward and config.split_backward != "off"
        self._budget_bytes = budget_bytes(limits, context)
        extras = sorted(EXTRAS, key=lambda extra: extra != 2) if limits.num_stages > DEEP else EXTRAS
        self._extras = list(dict.fromkeys(min(extra, config.max_extra) for extra in extras))

    def keep(self, incoming: StepPlan) -> None:
        """The plan that came in, if it has micro-batches; with as much recomputation as it needs."""
        if incoming.micro_batches:
            came = judge(incoming.revised(limits=self._limits), self._context, "incoming")
            self._candidates.append(came)
            if (
                not self._limits.v_shape
                and self._config.recompute == "auto"
                and (self._context.costs.recompute or not came.fits)
            ):
                self._refine(self._placing(keeping_all(_explicit(came.plan), self._context, self._config)))

    def keep_baselines(self, incoming: StepPlan) -> None:
        """Other people's plans under the same caps, as far as they are faster than what would be chosen, and what the
        fastest could be besides."""
        limited = replace(incoming, limits=self._limits)
        for name, baseline in BASELINES.items():
            with suppress(EvenloadError):
                chosen = self._chosen
                bar_s = chosen.step_s if chosen and chosen.fits else math.inf
                plan = baseline.below(limited, self._context, self._config, bar_s)
                if plan is not None:
                    named = judge(plan.revised(made_by=f"pipeline ({name})"), self._context, name)
                    self._candidates.append(named)
                    if named.fits and named.step_s <= self._least_s and not self._limits.v_shape:
                        self._refine(self._placing(named.plan))

    def improve(self, incoming: StepPlan) -> None:
        """Candidates of our own, those first that are fastest where memory is left out, W passes placed."""
        drafts: list[Placing] = []
        ends: list[tuple[float, StepPlan]] = []
        """What each chunking may come to with small chunks first."""

        def weigh(chunked: StepPlan, *, played: bool) -> None:
            bar_s = min((one.end_s for one in drafts if one.fits), default=math.inf)
            end_s = least_s(chunked, self._context, split=self._splits)
            if end_s < bar_s * (1 + SLACK):
                more = list(self._drafts(chunked, played=played))
                end_s = min(one.end_s for one in more)
                drafts.extend(more)
            ends.append((end_s - saved_s(chunked, self._context), chunked))

        for chunked in self._unordered(incoming):
            weigh(chunked, played=False)
        ends.sort(key=lambda one: one[0])
        for _, chunked in ends[:OPENED] if self._limits.num_stages > 1 else ():
            other = opened(chunked, self._context, self._config, closes=not self._splits)
            if other is not None:
                weigh(other, played=True)
        finalists: list[StepPlan] = []
        for draft in sorted(drafts, key=lambda one: one.end_s):
            again = draft.fits and any(draft.plan.micro_batches is one.micro_batches for one in finalists)
            bar_s = self._least_s * (1 + SLACK) - after_passes_s(self._context)
            if not again and draft.end_s < bar_s and (len(finalists) < FINALISTS or not draft.fits):
                finalists.append(draft.plan)
                others = self._others(draft.plan) if draft.fits else ()
                self._refine(min((draft, *others), key=lambda one: one.end_s))

    def improve_in_v(self, incoming: StepPlan) -> None:
        """Candidates of our own on devices that have two stages."""
        drafts: list[StepPlan] = []
        for chunked in self._unordered(incoming):
            small_first = opened(chunked, self._context, self._config, closes=not self._splits)
            drafts += [keeping_all(one, self._context, self._config) for one in (chunked, small_first) if one]
        self._candidates += [
            judge(one, self._context)
            for one in fastest_in_v(drafts, self._context, self._budget_bytes, splits=self._splits)
        ]
        for draft in drafts if self._least_s == math.inf and self._config.recompute == "auto" else ():
            with suppress(DoesNotFitError):
                fits = fitted(merged(ordered(draft, self._context)), self._context, self._config, solver=False)
                self._candidates.append(judge(fits, self._context))

    def _unordered(self, incoming: StepPlan) -> Iterator[StepPlan]:
        """Micro-batches of each rank in forward order, without an order of passes."""
        own = incoming.backward or incoming.replayed or incoming.shared or incoming.offload
        if incoming.micro_batches and not own:
            made_by = f"{incoming.made_by}, pipeline" if incoming.made_by else "pipeline"
            yield incoming.revised(order=(), merge=(), recompute=(), limits=self._limits, made_by=made_by)
        try:
            yield from chunkings(incoming, self._limits, self._context, self._config)
        except EvenloadError as error:  # a sequence that must stay whole here; the plan that came in has it somehow
            if not incoming.micro_batches:
                raise
            self._note = f"pipeline: no chunks of its own: {error.what} ({error.found})"

    def _drafts(self, chunked: StepPlan, *, played: bool) -> Iterator[Placing]:
        """In elastic order: stages run ahead as far as the settings let them, or as far as their memory does."""
        chunked = in_rounds(chunked)
        few = len(chunked.micro_batches) <= FEW
        played = played and len(chunked.micro_batches) * self._limits.num_stages <= PLAYED
        for extra in self._extras[: 2 if few else 1]:
            if (draft := self._ordered(chunked, extra, played=played)).fits:
                yield draft
                continue
            # What is held for a stage that runs ahead would be recomputed.
            least = min(self._extras)
            yield self._ordered(chunked, least, played=True)
            yield self._ordered(chunked, least, self._budget_bytes)
            break

    def _others(self, draft: StepPlan) -> Iterator[Placing]:
        """With stages further ahead or less far, or as passes start when stages run against each other."""
        first, *others = self._extras
        drafts = chain([self._ordered(draft, first, played=True)], (self._ordered(draft, extra) for extra in others))
        return (one for one in drafts if one.fits)

    def _ordered(self, plan: StepPlan, extra: int, cap_bytes: float = math.inf, *, played: bool = False) -> Placing:
        order = ordered(plan, self._context, extra=extra, cap_bytes=cap_bytes, played=played)
        return self._placing(keeping_all(order, self._context, self._config))

    def _placing(self, plan: StepPlan) -> Placing:
        return Placing(plan, self._context, self._budget_bytes, self._splits)

    def _refine(self, draft: Placing) -> None:
        """A candidate of the draft, W passes placed, with recomputation where it needs that, as little as can be found
        where it is among the fastest; none where that is not enough."""
        if not draft.fits and self._config.recompute == "auto":
            try:
                draft = self._placing(fitted(draft.plan, self._context, self._config, solver=False))
            except DoesNotFitError as problem:
                if self._problem is None or problem.missing_bytes < self._problem.missing_bytes:
                    self._problem = problem
                return
        candidate = self._add(draft)
        if any(map(any, candidate.plan.recompute)) and candidate.step_s <= self._least_s:
            with suppress(EvenloadError):
                self._add(self._placing(fitted(draft.plan, self._context, self._config)))

    def _add(self, draft: Placing) -> Candidate:
        placed = draft.placed()
        # What ranks in step wait for each other is not in the draft's own clock.
        plans = {id(one): one for one in ((placed, draft.plan) if self._limits.in_step > 1 else (placed,))}
        self._candidates += [judge(one, self._context) for one in plans.values()]
        return self._candidates[-1]

    @property
    def _least_s(self) -> float:
        return min((one.step_s for one in self._candidates if one.fits), default=float("inf"))

    @property
    def _chosen(self) -> Candidate | None:
        """The fastest that fits, or one next to it that holds less."""
        return best(self._candidates, (SMALLER, FASTEST))

    def best(self, incoming: StepPlan) -> StepPlan:
        """The chosen plan. Raises EvenloadError where none fits."""
        chosen = self._chosen
        if chosen is None or not chosen.fits:
            if self._problem:
                raise refused(self._problem, incoming, self._context, self._config)
            raise EvenloadError(
                "no order of the pipeline fits into memory",
                f"the best one is {min(one.missing_bytes for one in self._candidates) / GIB:.3g} GiB over",
                "let layers be recomputed (plugins.pipeline.recompute=auto), or lower plugins.pipeline.max_tokens",
            )
        own = [self._note] if self._note else []
        plan = chosen.plan.revised(notes=(*chosen.plan.notes, *_notes(chosen.plan), *own), bound_s=incoming.bound_s)
        return beside(plan, (f"pipeline.{name}" for name in BASELINES))


def _explicit(plan: StepPlan) -> StepPlan:
    """With the host's own order written down, where the plan leaves it to the host and ranks share nothing. A shared
    micro-batch is in the lists of several ranks; a stage's order names it once."""
    if plan.order or plan.shared:
        return plan
    stages = range(plan.limits.num_stages)
    return plan.revised(order=tuple(tuple(op for row in orders_of_stage(plan, s) for op in row) for s in stages))


def _notes(plan: StepPlan) -> list[str]:
    count, split = len(plan.passes("B")), sum(map(len, plan.split))
    notes = ["pipeline: one stage, nothing to order"] if plan.limits.num_stages == 1 else []
    if split:
        of = count * plan.limits.num_stages
        notes.append(f"pipeline: {split} of {of} backward passes leave their weight gradients to passes of their own")
    if any(map(any, plan.recompute)):
        layers = ", ".join(map(str, plan.limits.layers)) or plan.limits.layers_per_stage
        means = ", ".join(f"{sum(row) / len(row):.2g}" for row in plan.recompute)
        notes.append(f"pipeline: recomputed layers a micro-batch, by stage: {means} of {layers}")
    return notes


def _alone(incoming: StepPlan, context: PlanningContext, config: PipelineConfig) -> StepPlan:
    """The plan that came in where there is no order to choose; with as much recomputation as it needs."""
    in_step = incoming.limits.all_in_step
    if not incoming.micro_batches:
        refuse_ranks_in_step(incoming.limits)
    note = f"pipeline: {'ranks run in step' if in_step else 'one stage'}, nothing to order"
    plan = incoming.revised(limits=limits_for(incoming, config), notes=(*incoming.notes, note))
    again = context.costs.recompute
    if config.recompute == "off" or (not again and judge(plan, context).fits):
        return plan
    return fitted(_explicit(plan), context, config)
