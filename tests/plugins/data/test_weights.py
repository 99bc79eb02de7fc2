"""Weights of samples against references written from their equations, over the batch of all ranks."""

import json
import math

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.policies import SeenSamples, chosen_policy, started, stepped
from evenload.core.registry import data_policies

load_plugins()


def chosen(name, **settings):
    return chosen_policy("weight", name, settings, data_policies("weight"))


def batch(count=24):
    rng = np.random.default_rng(4)
    targets = rng.integers(1, 80, count)
    return SeenSamples(rng.lognormal(0, 0.5, count) * targets, targets)


def weigh(policy, seen):
    state, last = started(policy, seen)
    _, weights = stepped(policy, state, seen, last)
    return weights


@pytest.mark.parametrize("strategy", ["linear", "uniform", "quadratic", "extremes"])
def test_loss_is_its_equation_over_the_global_batch(strategy):
    seen, delta, r = batch(), 0.7, 0.4
    losses = [loss / count for loss, count in zip(seen.losses, seen.targets, strict=True)]
    top, bottom = max(losses), min(losses)
    scores = []
    for loss in losses:
        h = 2 * delta * loss / (top - bottom) - delta * (top + bottom) / (top - bottom)
        score = {"linear": min(h + delta, delta), "uniform": h, "quadratic": 1 - h**2 / delta**2, "extremes": abs(h)}
        scores.append(score[strategy])
    odds = [math.exp((score - max(scores)) / r) for score in scores]
    ours = weigh(chosen("loss", strategy=strategy, delta=delta, temperature=r), seen)
    np.testing.assert_allclose(ours, [one / sum(odds) for one in odds], rtol=1e-12)
    order = np.random.default_rng(1).permutation(24)
    again = weigh(
        chosen("loss", strategy=strategy, delta=delta, temperature=r),
        SeenSamples(seen.losses[order], seen.targets[order]),
    )
    assert again.tolist() == ours[order].tolist(), "whatever ranks and micro-batches have which sample"


def test_losses_that_are_all_alike_weigh_alike_and_a_sample_without_targets_nothing():
    targets = np.array([3, 5, 0, 2])
    assert weigh(chosen("loss"), SeenSamples(2.0 * targets, targets)).tolist() == [1 / 3, 1 / 3, 0, 1 / 3]


def test_adapt_is_its_equation_and_keeps_its_anchors():
    rng = np.random.default_rng(5)
    seen = batch(6)._replace(vectors=rng.normal(size=(6, 4)), anchors=rng.normal(size=(3, 4)))
    expected = []
    for own in seen.vectors:
        cosines = [float(own @ one) / math.sqrt(float(own @ own) * float(one @ one)) for one in seen.anchors]
        expected.append(min(max(1 / (1 + math.exp(-sum(cosines) / 3 / 0.2)), 0.3), 0.8))
    policy = chosen("adapt", tau=0.2, low=0.3, high=0.8)
    state, last = started(policy, seen)
    state, weights = stepped(policy, state, seen, last)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    _, again = stepped(policy, json.loads(json.dumps(state)), seen._replace(anchors=None), last)
    assert again.tolist() == weights.tolist()


def test_objective_weights_undo_what_shares_do():
    domains, shares = np.array([0, 1, 1, 2, 0]), np.array([0.5, 0.3, 0.2])
    seen = batch(5)._replace(domains=domains, shares=shares)
    weights = weigh(chosen("objective", wanted=[2, 1, 1]), seen)
    np.testing.assert_allclose(weights, [(0.5, 0.25, 0.25)[i] / shares[i] for i in domains], rtol=1e-12)


def test_a_column_is_taken_as_it_stands():
    column = np.array([0.5, 0.0, 2.0])
    assert weigh(chosen("column"), batch(3)._replace(column=column)).tolist() == column.tolist()
    with pytest.raises(EvenloadError, match="'column' needs what is not there"):
        weigh(chosen("column"), batch(3))


@pytest.mark.parametrize("column", [[0.5, math.nan, 1], [1, -1, 1], [1, 1], [0, 0, 0]])
def test_weights_that_are_none_leave_the_last_ones(column, caplog):
    with caplog.at_level("WARNING", logger="evenload"):
        assert weigh(chosen("column"), batch(3)._replace(column=np.array(column))).tolist() == [1, 1, 1]
    assert "the weight policy 'column' failed" in caplog.text
