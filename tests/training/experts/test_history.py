"""Loads that a run learns from: who needs them, what planners know when, and what a checkpoint carries."""

import json
from dataclasses import replace
from types import SimpleNamespace

import evenload
import numpy as np
import pytest
from evenload.core.costs import refit
from evenload.core.experts.history import updated
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Draw, Planner
from evenload.core.recipe.recipe import parse
from evenload.core.registry import Baseline, Baselines, LayerPlugin, PluginConfig
from evenload.runtime.experts import history as gathering
from evenload.runtime.experts.gate import Load
from evenload.training.learning import LoadHistory, Refitting, predict_step
from evenload.training.metrics import MeasuredStep
from evenload.training.step_hooks import StepHooks, TrainedStep

MODEL = {"family": "mixtral", "num_layers": 2, "hidden_size": 64, "moe": {"num_experts": 4, "topk": 2}}


def hottest(plan, context, config):
    """Rank 1 gets a copy of the hotter of rank 0's experts in each layer."""
    copies = tuple(((), (int(np.argmax(loads[:2])),)) for loads in context.experts.loads)
    return plan.revised(experts=ExpertPolicy("clone", 1, copies=copies))


def none(plan, context, config):
    return plan


PLUGIN = LayerPlugin(
    name="backward",
    summary="",
    papers=(),
    stage=90,
    config=PluginConfig,
    plan=hottest,
    baselines=Baselines({"forgetful": Baseline(none)}),
    needs_loads=lambda config, baseline: not baseline,
)


@pytest.fixture(autouse=True)
def backward():
    evenload.register(PLUGIN)
    yield
    evenload.unregister("backward")


def begun(chain, state=None):
    """Loads of a run, which goes on from this state."""
    history = LoadHistory(chain)
    if state is not None:
        StepHooks([history]).restore({"loads": state})
    return history


def chain_of(**changes):
    plugins = {"packing": {"enabled": True, "max_tokens": 4096}, "backward": {"enabled": True}}
    recipe = parse({"model": MODEL, "parallel": {"dp": 2, "ep": 2}, "plugins": plugins, **changes})
    return PlanChain.of_recipe(recipe, recipe.layout())


class Draws:
    def __init__(self, begin=0):
        self.step = begin

    def __call__(self):
        self.step += 1
        lengths = np.random.default_rng(self.step).integers(100, 2000, 6)
        return Draw(np.arange(6), lengths, {})


def result_of(step):
    """Of this rank; the other one has as many tokens for every expert."""
    counts = np.random.default_rng(100 + step).integers(0, 99, (2, 2, 4)).tolist()
    loads = [Load(k, layer, tuple(counts[k][layer]), 1.0, 1.0) for k in range(2) for layer in range(2)]
    return SimpleNamespace(expert_loads=tuple(loads))


def sums(step):
    return 2.0 * np.array([load.counts for load in result_of(step).expert_loads]).reshape(2, 2, 4).sum(axis=0)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    calls = []

    def everyone(own):
        calls.append(1)
        return [own, own]

    monkeypatch.setattr(gathering, "everyone", everyone)
    return calls


def run(history, planner, first, steps):
    """Digests of plans, and the loads that they were made with."""
    rows = []
    for step in range(first, first + steps):
        planned = planner.next()
        rows.append((planned.plan.digest, planned.chain.context.experts.loads))
        history.learn(planner, result_of(step))
    return rows


@pytest.mark.parametrize("background", [True, False])
def test_a_plan_knows_all_steps_before_but_the_one_under_way(background):
    history = LoadHistory(chain_of())
    rows = run(history, Planner(history.newest(chain_of()), Draws(), background=background, budget_s=60), 0, 5)
    known = [()]
    for step in range(5):
        known.append(updated(known[-1], sums(step)))
    assert [loads for _, loads in rows] == ([(), *known[:4]] if background else known[:5])


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_run_plans_as_if_it_had_not_stopped(background):
    started = LoadHistory(chain_of())
    planner = Planner(chain_of(), Draws(), background=background, budget_s=60)
    run(started, planner, 0, 5)
    state = json.loads(json.dumps(started.state(planner)))
    wanted = run(started, planner, 5, 4)
    assert len({digest for digest, _ in wanted}) == 4

    def resumed(state):
        history = begun(chain_of(), state)
        chains = history.newest(chain_of()), history.first(chain_of())
        again = Planner(chains[0], Draws(5), background=background, budget_s=60, first=chains[1])
        return run(history, again, 5, 4)

    assert resumed(state) == wanted
    assert (state["ahead"] != state["newest"]) == background
    for name, other in (("ahead", "newest"), ("newest", "ahead")) if background else ():
        assert resumed({**state, name: state[other]}) != wanted, f"{name} is in the state for nothing"


def test_costs_that_follow_the_steps_and_loads_are_learned_side_by_side():
    chain = chain_of(planner={"refit": True})
    host = SimpleNamespace(busy_waits=False, layout=chain.context.layout)
    recipe = SimpleNamespace(planner=SimpleNamespace(refit=True))
    job = SimpleNamespace(recipe=recipe, host=host, gather=lambda *values: np.array([values, [0.0] * len(values)]))
    refitting, history = Refitting(job, chain), LoadHistory(chain)
    hooks = StepHooks([refitting, history])
    planner = Planner(chain, Draws(), budget_s=60)
    for step in range(3):
        planned = planner.next()
        predicted_step = predict_step(planned, refits=True)
        busy_s = np.full((1, 2), 1.0 + step)
        taken = MeasuredStep(result_of(step), 4.0 + step, 0.0, 0.0, busy_s, busy_s / 3, np.zeros((2, 3)))
        hooks.after(planner, TrainedStep(step, planned, taken, predicted_step))
    context = planner.chain.context
    assert context.experts.loads == history.newest(chain).context.experts.loads
    assert np.array_equal(refit.coefficients(context.costs), refit.coefficients(refitting.chain.context.costs))
    assert context.costs != chain.context.costs
    state = hooks.state(planner)
    assert set(state) == {"refit", "loads"}
    ahead = planner.chain_of_next.context
    refitting, history = Refitting(job, chain), LoadHistory(chain)
    StepHooks([refitting, history]).restore(json.loads(json.dumps(state)))
    again = history.first(refitting.first).context
    assert (again.costs, again.experts) == (ahead.costs, ahead.experts)


@pytest.mark.parametrize("instead", ["forgetful", "none"])
def test_nothing_is_gathered_where_no_planner_looks_back(instead, two_ranks):
    chain = replace(chain_of(), instead="forgetful") if instead == "forgetful" else chain_of(plugins={})
    history = begun(chain, {"ahead": [], "newest": [[1.0] * 4] * 2})
    planner = Planner(chain, Draws())
    history.learn(planner, result_of(0))
    assert not two_ranks
    assert StepHooks([history]).state(planner) == {}
    assert history.newest(chain) is history.first(chain) is chain
    assert planner.chain is chain


@pytest.mark.parametrize(
    "state", [{}, {"ahead": [], "newest": [[1.0] * 8] * 2}, {"ahead": [], "newest": [[-1.0] * 4] * 2}, {"ahead": 1}]
)
def test_a_state_of_another_model_is_left_aside(state):
    history = begun(chain_of(), state)
    assert history.newest(chain_of()).context.experts.loads == ()
