"""The costs of a run's planner: what a checkpoint carries, and when nothing is fitted."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.core.costs import refit
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Draw, Planner
from evenload.core.recipe.recipe import parse
from evenload.training.learning import Refitting, predict_step
from evenload.training.metrics import MeasuredStep
from evenload.training.step_hooks import StepHooks, TrainedStep

RECIPE = parse(
    {"parallel": {"dp": 2}, "planner": {"refit": True}, "plugins": {"packing": {"enabled": True, "max_tokens": 4096}}}
)


def job(recipe=RECIPE, waits=False, **layout):
    """Two ranks, of which this is the first."""
    host = SimpleNamespace(busy_waits=waits, layout=replace(recipe.layout(), **layout))
    return SimpleNamespace(recipe=recipe, host=host, gather=lambda *values: np.array([values, [0.0] * len(values)]))


def begun(of=None, state=None):
    """Costs of a run, which goes on from this state."""
    refitting = Refitting(of or job(), chain_of())
    if state:
        StepHooks([refitting]).restore({"refit": state})
    return refitting


def chain_of(recipe=RECIPE):
    return PlanChain.of_recipe(recipe, recipe.layout())


class Draws:
    def __init__(self, begin=0):
        self.step = begin

    def __call__(self):
        self.step += 1
        lengths = np.random.default_rng(self.step).lognormal(6, 1, 12).astype(np.int64).clip(4, 4096)
        return Draw(np.arange(12), lengths, {})


def run(refitting, planner, first, steps):
    """Plans and newest costs of some steps, in which attention took 30 times what the recipe's costs say."""
    truth = refit.coefficients(chain_of().context.costs)[:6] * [1, 1, 30, 1, 1, 30]
    found = []
    for step in range(first, first + steps):
        planned = planner.next()
        predicted_step = predict_step(planned, refits=True)
        assert predicted_step.work is not None
        forward_s, backward_s = (predicted_step.work @ truth).T[:, None]
        busy_s = forward_s + backward_s
        taken = MeasuredStep(None, float(busy_s.max()) + 0.5, 0.0, 0.0, busy_s, forward_s, np.zeros((2, 3)))
        refitting.after(planner, TrainedStep(step, planned, taken, predicted_step))
        found.append((planned.plan.digest, refit.coefficients(refitting.chain.context.costs).tolist()))
    return found


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_run_plans_as_if_it_had_not_stopped(background):
    started = begun()
    planner = Planner(started.chain, Draws(), background=background, budget_s=60)
    run(started, planner, 0, 6)
    state = json.loads(json.dumps(started.state(planner)))
    wanted = run(started, planner, 6, 4)
    resumed = begun(state=state)
    again = Planner(resumed.chain, Draws(6), background=background, budget_s=60, first=resumed.first)
    assert run(resumed, again, 6, 4) == wanted
    assert (state["ahead"] != state["newest"]) == background
    assert started.fitted()["newest"][2] > 5 * started.fitted()["prior"][2]
    for lost in ({"window": []}, {"newest": state["prior"]}) if background else ():
        other = begun(state={**state, **lost})
        third = Planner(other.chain, Draws(6), budget_s=60, first=other.first)
        assert run(other, third, 6, 4) != wanted, f"{list(lost)} is in the state for nothing"


def test_without_a_state_that_fits_the_recipe_counts():
    started = begun()
    planner = Planner(started.chain, Draws(), budget_s=60)
    run(started, planner, 0, 5)
    state = started.state(planner)
    prior = chain_of().context.costs
    assert started.chain.context.costs != prior
    for found in (
        begun(),
        begun(job(pp=2), state),
        begun(state={**state, "prior": [0.0] * 7}),
    ):
        assert found.chain.context.costs == found.first.context.costs == prior


def test_it_is_off_by_default_and_where_passes_hold_waiting(caplog):
    plain = RECIPE.changed({"planner.refit": False})
    planner = Planner(chain_of(), Draws())
    for one, said in ((job(plain), 0), (job(waits=True), 1)):
        caplog.clear()
        refitting = begun(one)
        assert len(caplog.records) == said
        assert not refitting.on
        assert StepHooks([refitting]).state(planner) == {}
        assert refitting.fitted() is None
    assert "planner.refit has no effect" in caplog.text
