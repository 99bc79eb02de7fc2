"""Objectives of domains as weights of sequences: sums of mean losses, in value and gradient; and sums of steps."""

import numpy as np
import pytest
from evenload.core.policies import SeenDomains, objective_weights, seen_domains
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 2**32))
def test_weighted_sums_are_the_sum_of_the_domains_mean_losses(seed):
    """In value and gradient: a token counts as in the mean of its domain, whatever its loss."""
    rng = np.random.default_rng(seed)
    domain, targets = np.append(rng.integers(0, 4, 20), [0, 1, 2, 3]), rng.integers(1, 50, 24)
    objective = rng.dirichlet(np.ones(4))
    weights = objective_weights(tuple(objective), domain, targets.astype(float))
    assert weights / (weights @ targets) == pytest.approx((objective / np.bincount(domain, targets))[domain], rel=1e-12)
    assert weights @ targets == pytest.approx(targets.sum(), rel=1e-12), "as large as that of a mean"


def test_what_is_not_in_a_batch_takes_nothing_from_the_others():
    weights = objective_weights((0.5, 0.3, 0.2), np.array([0, 2, 2]), np.array([10.0, 4.0, 1.0]))
    assert weights == pytest.approx([0.5 / 0.7 * 15 / 10, 0.2 / 0.7 * 15 / 5, 0.2 / 0.7 * 15 / 5])
    assert not objective_weights((0.0, 1.0), np.array([0, 0]), np.array([3.0, 4.0])).any()
    negative = objective_weights((0.5, 0.5), np.array([0, 1]), np.array([-3.0, 4.0]))
    assert negative.tolist() == [0.0, 1.0], "weights of the data that add up to less than nothing"


@given(st.integers(0, 2**32), st.booleans())
def test_sums_of_steps_are_those_of_all_their_sequences_and_places_pick_domains(seed, knows_excess):
    rng = np.random.default_rng(seed)
    domain, targets = rng.integers(0, 4, 30), rng.integers(0, 50, 30)
    losses, excess = rng.integers(0, 99, (2, 30)) / 4.0  # sums of quarters are exact
    part = np.split(np.arange(30), sorted(rng.integers(0, 31, 2)))

    def seen(own):
        return seen_domains(4, domain[own], losses[own], targets[own], excess[own] if knows_excess else None)

    total = seen(part[0]).plus(seen(part[1])).plus(seen(part[2]))
    rows = [[values[domain == k].sum() for k in range(4)] for values in (losses, targets, np.ones(30), excess)]
    for got, wanted in zip(total, rows if knows_excess else [*rows[:3], None], strict=True):
        assert (got is None and wanted is None) or got.tolist() == wanted
    places = rng.permutation(4)[: rng.integers(1, 5)].tolist()
    for got, wanted in zip(total.at(places), total, strict=True):
        assert (got is None and wanted is None) or got.tolist() == wanted[places].tolist()


def test_what_one_step_does_not_know_the_sum_does_not_know():
    known, unknown = (SeenDomains(np.ones(2), np.ones(2, int), np.ones(2, int), own) for own in (np.ones(2), None))
    assert known.plus(unknown).excess is None
    assert unknown.plus(known).excess is None
