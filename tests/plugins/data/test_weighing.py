"""Weights beside a loop without a model: by the equation of the policy, from what is wanted every so many steps."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.planner import Draw
from evenload.core.recipe.recipe import parse
from evenload.integrations.host.scoring import Scores
from evenload.plugins.data import weighing
from evenload.plugins.data.weighing import Weighing
from evenload.training.step_hooks import StepHooks

WANTED, TAU, EVERY = np.arange(5), 0.5, 3


def vectors_at(step, samples):
    """Of the weights of a step; those of what is wanted move, too."""
    return np.sin(samples[:, None] * 7.3 + np.arange(6) * 1.7 + 0.4 * step)


class Scored:
    """A scorer of the training data, or of what is wanted, at the step that `now` says."""

    now = 0

    def __init__(self, job):
        self._wanted = job.source == "held out"

    def scores(self, samples, *, vectors):
        rows = vectors_at(Scored.now, samples) if vectors else None
        return Scores(np.ones(len(samples)), np.ones(len(samples), np.int64), vectors=rows)


@pytest.fixture(autouse=True)
def scorers(monkeypatch):
    monkeypatch.setattr(weighing, "Scorer", Scored)
    monkeypatch.setattr(weighing, "draws_of", lambda *_: [SimpleNamespace(samples=WANTED)])
    monkeypatch.setattr(weighing, "replace", lambda one, **changes: SimpleNamespace(**{**vars(one), **changes}))


def asking():
    weight = {"policy": "adapt", "settings": {"tau": TAU, "every": EVERY}}
    return parse(
        {"data": {"validation": {"source": "quickstart"}}, "plugins": {"data": {"enabled": True, "weight": weight}}}
    )


def run(until, kept=None, begin=0, of_data=(1.0, 1.0, 1.0, 1.0)):
    """The weights of every step, and what a checkpoint behind it keeps; ``of_data``: those that the samples have."""
    recipe = asking()
    chosen = recipe.data_policy("weight")
    job = SimpleNamespace(recipe=recipe, held_out="held out", source="training data")
    assert chosen
    hook = Weighing(job, chosen, Scored(job))
    hooks = StepHooks([hook])
    if kept:
        hooks.restore(kept)
    weights, states = [], []
    for step in range(begin, until):
        Scored.now = step
        samples = np.arange(4) + 4 * step
        draw = Draw(samples, np.ones(4, np.int64), {})
        planned = hook.planned(SimpleNamespace(draw=draw._replace(weight=np.array(of_data))))
        weights.append(planned.draw.weight)
        states.append(json.loads(json.dumps(hooks.state(None))))
    return weights, states


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_weights_are_those_of_the_equation_by_anchors_of_every_third_step():
    weights, _ = run(7)
    for step, own in enumerate(weights):
        anchors = unit(vectors_at(step - step % EVERY, WANTED))
        cosines = unit(vectors_at(step, np.arange(4) + 4 * step)) @ anchors.T
        assert own == pytest.approx(1 / (1 + np.exp(-cosines.mean(axis=1) / TAU)), rel=1e-12)


def test_what_the_data_weigh_is_multiplied_by_what_the_policy_answers():
    of_data = np.array([0.5, 2.0, 0.0, 1.0])
    for alone, both in zip(run(3)[0], run(3, of_data=of_data)[0], strict=True):
        assert both.tolist() == (of_data * alone).tolist()
        assert len(set(alone.tolist())) == 4


def test_a_run_that_is_killed_after_any_step_weighs_as_it_would_have():
    weights, states = run(7)
    before = {"weigh": {key: value for key, value in states[2]["weigh"].items() if key != "steps"}}
    older, _ = run(4, before, 3)
    assert (older[0] == weights[3]).all(), "a checkpoint from before steps were counted"
    for kill in range(1, 7):
        again, _ = run(7, states[kill - 1], kill)
        assert all((one == other).all() for one, other in zip(again, weights[kill:], strict=True)), "to the last bit"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data.validation": None}, "needs vectors; a run shows losses, targets"),
        ({"parallel.tp": 2, "megatron.sequence_parallel": True}, "whole on each tensor-parallel rank"),
    ],
)
def test_what_has_no_vectors_is_refused(changes, what):
    with pytest.raises(EvenloadError, match=what):
        asking().changed(changes)
