"""What a run learns from its steps: costs, where ``planner.refit`` is on, and loads of experts.

One plan is always being made ahead, so what is new shapes the plan after next. A checkpoint holds what the plan ahead
knows and the newest: a run that is resumed goes on as if it had not been interrupted. All ranks must plan alike to the
last bit. So rank 0 fits costs (`core.costs.refit`), and its numbers go to all; a run with another prior or layout
starts from the recipe's costs. Of loads (`core.experts.history`) every rank adds the same integers up, on any layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.aliases import Floats
from ..core.costs import refit
from ..core.costs.costs import Costs
from ..core.experts.history import Loads
from ..core.planning.chain import PlanChain
from ..core.planning.planner import Planned, Planner
from ..core.simulate.predict import predict
from ..core.simulate.step import simulate
from ..integrations.host.trained import StepResult
from ..runtime.experts.history import learned
from .job import Job, logger
from .metrics import MeasuredStep
from .step_hooks import PredictedStep, StepHook, TrainedStep


def predict_step(planned: Planned, *, refits: bool) -> PredictedStep:
    """Predict a plan with the costs that it was made with."""
    context, plan = planned.chain.context, planned.plan
    outcome = simulate(plan, context, record=False)
    if not refits:
        return PredictedStep(outcome.step_s, 0.0, 0.0, None, outcome.busy_s)
    compute = predict(plan, context.costs, head_frac=context.head_frac)
    work = refit.rows_of(plan, context.costs.recompute)
    return PredictedStep(outcome.step_s, compute.step_s, max(compute.busy_s), work, outcome.busy_s)


class Refitting(StepHook):
    """The costs of one run, first those of ``chain``; they stay unless the recipe asks for a fit, `on`."""

    key = "refit"
    anew = "planner.refit starts anew"

    def __init__(self, job: Job, chain: PlanChain) -> None:
        self._job, self._prior = job, chain.context.costs
        self._window = refit.Window(self._prior)
        self.chain = self.first = chain
        self.on = _has_effect(job)

    def after(self, planner: Planner, step: TrainedStep) -> None:
        """Learn from a step, unless it is the first of all, which warms up. Collective."""
        if step.number == 0:
            return
        newest = np.zeros(7)
        if step.predicted is not None:
            self._add(step.planned, step.taken, step.predicted)
            newest = self._window.coefficients()
        agreed = np.array(self._job.gather(*newest.tolist())[0])  # rank 0's numbers
        self.chain = _with(self.chain, agreed)
        planner.chain = self.chain

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint needs; whole on rank 0."""
        ahead, newest = planner.chain_of_next.context.costs, self.chain.context.costs
        named = _coefficients(prior=self._prior, ahead=ahead, newest=newest)
        return {**named, "layout": self._layout, "window": self._window.state()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the costs of a checkpoint. Raises ValueError where its prior or layout are others."""
        if saved["prior"] != refit.coefficients(self._prior).tolist() or saved["layout"] != self._layout:
            raise ValueError("costs or layout differ")
        chains = [_with(self.chain, np.array(saved[name])) for name in ("ahead", "newest")]
        self._window.restore(saved["window"])
        self.first, self.chain = chains

    def fitted(self) -> dict[str, list[float]] | None:
        """Coefficients of a stage at the beginning and now (`refit.coefficients`); None where nothing is fitted."""
        return _coefficients(prior=self._prior, newest=self.chain.context.costs) if self.on else None

    @property
    def _layout(self) -> list[int]:
        return [self._job.host.layout.tp, self._job.host.layout.pp]

    def _add(self, planned: Planned, taken: MeasuredStep, predicted_step: PredictedStep) -> None:
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


class LoadHistory(StepHook):
    """The loads of experts of a run, first none; they are learned, `on`, where plans of its ``chain`` need them."""

    key = "loads"
    anew = "loads of experts are learned anew"

    def __init__(self, chain: PlanChain) -> None:
        self.on = chain.layers.need_loads
        self._experts = chain.context.experts
        self._ahead: Loads = ()
        self._newest: Loads = ()

    def newest(self, chain: PlanChain) -> PlanChain:
        """The chain with the newest loads."""
        return chain.with_loads(self._newest) if self.on else chain

    def first(self, chain: PlanChain) -> PlanChain:
        """The chain with the loads that the first plan of this run knows."""
        return chain.with_loads(self._ahead) if self.on else chain

    def after(self, planner: Planner, step: TrainedStep) -> None:
        """Learn from a step. Collective."""
        self.learn(planner, step.taken.result)

    def learn(self, planner: Planner, result: StepResult) -> None:
        """Learn from what a step came to. Collective."""
        if self.on:
            chain = learned(self.newest(planner.chain), result.expert_loads)
            self._newest = _loads_of(chain)
            planner.chain = chain

    def state(self, planner: Planner) -> dict[str, Any]:
        """What a checkpoint keeps of the loads, ready for JSON."""
        return {"ahead": _loads_of(planner.chain_of_next), "newest": self._newest}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the loads of a checkpoint. Raises KeyError, TypeError or ValueError for those of another model."""
        self._ahead, self._newest = (self._read(saved[name]) for name in ("ahead", "newest"))

    def _read(self, rows: Any) -> Loads:
        """Raises TypeError or ValueError for what are no loads of this model."""
        assert self._experts is not None
        loads = tuple(tuple(map(float, row)) for row in rows)
        sizes = [len(row) for row in loads]
        if loads and sizes != [self._experts.num_experts] * len(self._experts.layers):
            raise ValueError(f"experts by layer: {sizes}")
        if not all(math.isfinite(value) and value >= 0 for row in loads for value in row):
            raise ValueError("a load that is not a number of tokens")
        return loads


def _loads_of(chain: PlanChain) -> Loads:
    assert chain.context.experts is not None
    return chain.context.experts.loads
