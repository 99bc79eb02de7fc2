"""What a run learns from its steps: costs, where ``planner.refit`` is on, loads of experts, and shares of domains.

One plan is always being made ahead, so what is new shapes the plan after next. A checkpoint holds what the plan ahead
knows and the newest: a run that is resumed goes on as if it had not been interrupted. All ranks must plan alike to the
last bit. So rank 0 fits costs (`core.costs.refit`), and its numbers go to all; a run with another prior or layout
starts from the recipe's costs. Of loads (`core.experts.history`) every rank adds the same integers up, on any layout.
Of shares rank 0 asks their policy, of sums that are the same on any ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..core.aliases import Floats
from ..core.costs import refit
from ..core.costs.costs import Costs
from ..core.experts.history import Loads
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Draw, Planned, Planner
from ..core.policies import seen_domains
from ..core.simulate.predict import predict
from ..core.simulate.step import simulate
from ..integrations.host.scoring import Scores
from ..integrations.host.trained import StepResult
from ..runtime.experts.history import learned
from ..runtime.world.agreement import from_first
from .drawing import Drawing
from .job import Job, logger
from .metrics import Taken


class PredictedStep(NamedTuple):
    """What the cost model says of a plan."""

    step_s: float
    compute_s: float
    """Passes alone."""
    busiest_s: float
    work: Floats | None
    """Columns for the fit, where there is one."""
    busy_s: Floats
    """Passes of every rank, [stages, plane ranks]."""


def predict_step(planned: Planned, *, refits: bool) -> PredictedStep:
    """Predict a plan with the costs that it was made with."""
    context, plan = planned.chain.context, planned.plan
    outcome = simulate(plan, context, record=False)
    if not refits:
        return PredictedStep(outcome.step_s, 0.0, 0.0, None, outcome.busy_s)
    compute = predict(plan, context.costs, head_frac=context.head_frac)
    work = refit.rows_of(plan, context.costs.recompute)
    return PredictedStep(outcome.step_s, compute.step_s, max(compute.busy_s), work, outcome.busy_s)


class Refitting:
    """The costs of one run, first those of ``chain`` or of a checkpoint's `state`; they stay unless the recipe asks."""

    def __init__(self, job: Job, chain: PlanChain, state: Mapping[str, Any] | None) -> None:
        self._job, self._prior = job, chain.context.costs
        self._window = refit.Window(self._prior)
        self.chain = self.first = chain
        self.on = _has_effect(job)
        if self.on and state is not None:
            self._restore(state)

    def after(
        self, planner: Planner, step: int, planned: Planned, taken: Taken, predicted_step: PredictedStep | None
    ) -> None:
        """Learn from a step, unless it is the first of all, which warms up. Collective."""
        if not self.on or step == 0:
            return
        newest = np.zeros(7)
        if predicted_step is not None:
            self._add(planned, taken, predicted_step)
            newest = self._window.coefficients()
        agreed = np.array(self._job.gather(*newest.tolist())[0])  # rank 0's numbers
        self.chain = _with(self.chain, agreed)
        planner.use(self.chain)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint needs; whole on rank 0."""
        if not self.on:
            return {}
        ahead, newest = planner.chain_of_next.context.costs, self.chain.context.costs
        named = _coefficients(prior=self._prior, ahead=ahead, newest=newest)
        return {"refit": {**named, "layout": self._layout, "window": self._window.state()}}

    def report(self) -> dict[str, list[float]] | None:
        """Coefficients of a stage at the beginning and now (`refit.coefficients`); None where nothing is fitted."""
        return _coefficients(prior=self._prior, newest=self.chain.context.costs) if self.on else None

    @property
    def _layout(self) -> list[int]:
        return [self._job.host.layout.tp, self._job.host.layout.pp]

    def _add(self, planned: Planned, taken: Taken, predicted_step: PredictedStep) -> None:
        assert predicted_step.work is not None
        context = planned.chain.context
        forward_s = taken.forward_s.mean(axis=0)
        backward_s = (taken.busy_s - taken.forward_s).mean(axis=0)
        step_s, busiest_s = taken.step_s - taken.wait_s, float((forward_s + backward_s).max())
        predicted_s = predicted_step.step_s, predicted_step.compute_s
        sharers = 1 if context.traffic.sharding == "none" else context.layout.dp_cp_size
        busiest = busiest_s, predicted_step.busiest_s
        rest_s = refit.rest_of_step(step_s, *predicted_s, busiest, context.costs.update_s, sharers)
        self._window.add(predicted_step.work, forward_s, backward_s, rest_s)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["prior"] != refit.coefficients(self._prior).tolist() or state["layout"] != self._layout:
            logger.info("planner.refit starts anew: costs or layout differ from those of the checkpoint")
            return
        self._window.restore(state["window"])
        self.first, self.chain = (_with(self.chain, np.array(state[name])) for name in ("ahead", "newest"))


def _coefficients(**costs: Costs) -> dict[str, list[float]]:
    return {name: refit.coefficients(one).tolist() for name, one in costs.items()}


def _with(chain: PlanChain, values: Floats) -> PlanChain:
    costs = refit.with_coefficients(chain.context.costs, values)
    return replace(chain, context=replace(chain.context, costs=costs))


def _has_effect(job: Job) -> bool:
    wanted, holds_waiting = job.recipe.planner.refit, job.host.busy_waits
    if wanted and holds_waiting:
        why = "and the time of a pass, by the wall clock or on CUDA, holds the waiting for other ranks"
        logger.warning("planner.refit has no effect: ranks exchange tensors inside their passes here, %s", why)
    return wanted and not holds_waiting


class LoadHistory:
    """The loads of experts of a run whose ``chain`` may need them; first nothing, or a checkpoint's `state`."""

    def __init__(self, chain: PlanChain, state: Mapping[str, Any] | None = None) -> None:
        self.on = chain.needs_loads
        self._experts = chain.context.experts
        self._ahead: Loads = ()
        self._newest: Loads = ()
        if self.on and state is not None:
            self._restore(state)

    def newest(self, chain: PlanChain) -> PlanChain:
        """The chain with the newest loads."""
        return chain.with_loads(self._newest) if self.on else chain

    def first(self, chain: PlanChain) -> PlanChain:
        """The chain with the loads that the first plan of this run knows."""
        return chain.with_loads(self._ahead) if self.on else chain

    def after(self, planner: Planner, result: StepResult) -> None:
        """Learn from a step. Collective."""
        if self.on:
            chain = learned(self.newest(planner.chain), result.expert_loads)
            self._newest = _loads_of(chain)
            planner.use(chain)

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of the loads, ready for JSON."""
        if not self.on:
            return {}
        return {"loads": {"ahead": _loads_of(planner.chain_of_next), "newest": self._newest}}

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._ahead, self._newest = (self._read(state[name]) for name in ("ahead", "newest"))
        except (KeyError, TypeError, ValueError) as error:
            logger.info("loads of experts are learned anew: those of the checkpoint are of another model (%s)", error)
            self._ahead = self._newest = ()

    def _read(self, rows: Any) -> Loads:
        """Raises TypeError or ValueError for what are no loads of this model."""
        assert self._experts is not None
        loads = tuple(tuple(map(float, row)) for row in rows)
        sizes = [len(row) for row in loads]
        if loads and sizes != [self._experts.num_experts] * len(self._experts.layers):
            raise ValueError(f"experts by layer: {sizes}")
        if not all(math.isfinite(value) and value >= 0 for row in loads for value in row):
            raise ValueError("a load that is no number of tokens")
        return loads


def _loads_of(chain: PlanChain) -> Loads:
    assert chain.context.experts is not None
    return chain.context.experts.loads


class LearnedShares:
    """The shares of one run's domains, first those of their policy or of a checkpoint's `state`; nothing where no
    policy learns."""

    def __init__(self, job: Job, drawing: Drawing, state: Mapping[str, Any] | None) -> None:
        self._drawing = drawing
        self._run = job.domains.learns if job.domains else None
        if self._run is None:
            return
        first, saved = self._run.drawn_by, (state or {}).get("mix", {})
        if (resumed := self._run.resumed(saved)) is not None:
            self._run, first = resumed, saved["ahead"]
        elif state is not None:
            logger.info("shares of domains are learned anew: the checkpoint has none of these domains and settings")
        drawing.use(self._run.drawn_by, first)

    def after(self, draw: Draw, scores: Scores | None) -> None:
        """Learn from a step. Collective."""
        if (run := self._run) is None:
            return
        assert scores is not None
        assert draw.domain is not None
        columns = scores.losses, scores.targets, scores.excess, scores.weights
        seen = seen_domains(run.num_domains, draw.domain, *columns)
        self._run = run._replace(**from_first(lambda: run.after(seen).progress))
        self._drawing.use(self._run.drawn_by)

    @property
    def outcome(self) -> dict[str, float] | None:
        """Shares by domain that their policy has found for a later run."""
        return None if self._run is None else self._run.outcome

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of the shares, ready for JSON."""
        if self._run is None:
            return {}
        ahead = planner.draw_of_next.state["policy"] if planner.draw_of_next else self._run.drawn_by
        return {"mix": {**self._run.saved(), "ahead": ahead}}
