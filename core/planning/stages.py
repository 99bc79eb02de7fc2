"""Planning in numbered stages of counted work: each leaves the best plan so far, so a late plan is a less good one.

    rules     the quick baselines of every plugin, and while no lawful plan is known the safer ones, the trainer's own
              last (`Rivals.rules`); none is planned whose floor is no less than the best so far
    plugins   the plan after each plugin in turn, where it keeps the caps and the settings of all
    last      what `PlanChain.plan` returns, baselines weighed

A stage is the same on every rank for the same batch, whatever a clock says: ranks that compare how far each has come
can all take the plan of the least stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..errors import EvenloadError
from ..plan.step_plan import Lengths, StepPlan
from .chain import PlanChain
from .judge import Candidate, check_wanted, floor_s, judge
from .trees import Branch, plan_shared

SHARE = 0.05
"""Of a predicted step that it may wait for its plan where no budget is set."""
FREE_S = 0.1
"""Seconds of planning in line that are not weighed against its step,"""
LEARN_EVERY = 64
"""and after how many batches that a rule planned one is planned whole, to learn what that gains."""


@dataclass(eq=False)
class PlanStages:
    """How far the planning of a batch has come. One thread adds, others read."""

    chain: PlanChain
    batch: Lengths
    trees: Sequence[Branch] = ()
    """What its samples share; empty: nothing."""
    best: list[Candidate | None] = field(default_factory=lambda: [None])
    """The best lawful plan after each stage, before the first: none."""
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    """Rules that could not plan, and why."""

    @property
    def reached(self) -> int:
        """Number of the last stage that is done."""
        return len(self.best) - 1

    @property
    def best_s(self) -> float:
        """Predicted seconds of the best plan so far; 0 where there is none."""
        return best.step_s if (best := self.best[-1]) else 0.0

    def at(self, stage: int) -> Candidate | None:
        """The best plan after a stage."""
        return self.best[stage]

    def run(self) -> Iterator[StepPlan | None]:
        """Do a stage after the other; None but for the last, which gives the plan of `PlanChain.plan`."""
        chain = self.chain
        if self.trees or not chain.staged:
            yield plan_shared(chain, self.batch, self.trees) if self.trees else chain.plan(self.batch)
            return
        known: list[Candidate] = []
        for candidate in map(self._of_rule, chain.rivals.rules):
            known += [candidate] if candidate else []
            self._add(candidate)
            yield None
        for plan in chain.in_turn(self.batch):
            self._add(self._of_links(plan))
            yield None
        final = chain.finished(plan, known)
        self._add(judge(final, chain.context), last=True)
        yield final

    def _of_rule(self, name: str) -> Candidate | None:
        chain, bar_s = self.chain, self._bar_s
        if (bar_s < math.inf and name not in chain.rivals.quick) or chain.rivals.least_s(name, self.batch) >= bar_s:
            return None
        try:
            plan = chain.rule(name, self.batch)
            return judge(plan, chain.context, name) if floor_s(plan, chain.context) < bar_s else None
        except Exception as error:
            self.failed.append((name, error))
            return None

    def _of_links(self, plan: StepPlan) -> Candidate | None:
        try:
            return None if self.chain.breaks(plan) else judge(self.chain.under_caps(plan), self.chain.context)
        except EvenloadError:
            return None

    @property
    def _bar_s(self) -> float:
        best = self.best[-1]
        return best.step_s if best and best.fits else math.inf

    def _add(self, candidate: Candidate | None, *, last: bool = False) -> None:
        check_wanted()
        best = self.best[-1]
        better = best is None or (candidate and (not candidate.fits, candidate.step_s) < (not best.fits, best.step_s))
        self.best.append(candidate if last or better else best)


@dataclass(eq=False)
class SyncPlanning:
    """Planning before a step that waits for it, without a clock: ranks count alike what planning takes and gains."""

    gained: float = math.inf
    """Share of the step that the last whole plan saved over the best rule."""
    since: int = 0
    """Batches that were planned by a rule since."""

    def plan(self, chain: PlanChain, batch: Lengths) -> StepPlan:
        """The plan of `PlanChain.plan`, or the best rule's where more takes over `SHARE` of a step and gains less."""
        work_s = chain.work_s(batch)
        if work_s <= FREE_S or not chain.staged:
            return chain.plan(batch)
        stages = PlanStages(chain, batch)
        steps = stages.run()
        list(islice(steps, len(chain.rivals.rules)))
        rule = stages.best[-1]
        if rule and rule.fits and work_s > max(SHARE, self.gained) * rule.step_s and self.since < LEARN_EVERY:
            self.since += 1
            note = f"planned by a rule: more takes about {work_s:.2g} s before a step of {rule.step_s:.2g} s"
            return chain.layers.written(rule.plan.revised(notes=(*rule.plan.notes, note)))
        *_, plan = steps
        assert plan is not None
        self.since, final_s = 0, judge(plan, chain.context).step_s
        self.gained = 1.0 - final_s / rule.step_s if rule else math.inf
        return plan
