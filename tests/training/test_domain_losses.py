"""What the samples of each domain came to, of one batch or of several."""

import math

import numpy as np
import pytest
from evenload.core.planning.planner import Draw
from evenload.integrations.host.scoring import Scores
from evenload.training.metrics import domain_losses


def part(*rows):
    """Of sequences their domain, length, loss and targets."""
    domain, lengths, losses, targets = map(np.array, zip(*rows, strict=True))
    draw = {"samples": np.arange(len(rows)), "lengths": lengths, "state": {}, "domain": domain}
    return Draw(**draw), Scores(losses.astype(float), targets)


def test_the_loss_of_a_domain_is_that_of_its_targets_over_all_batches():
    parts = [part((0, 5, 8.0, 4), (2, 9, 6.0, 3)), part((2, 4, 1.0, 1), (0, 3, 0.0, 2), (1, 2, 0.0, 0))]
    assert domain_losses(("code", "none", "web"), parts) == {
        "code": {"loss": pytest.approx(8 / 6), "samples": 2, "tokens": 8, "targets": 6},
        "web": {"loss": pytest.approx(7 / 4), "samples": 2, "tokens": 13, "targets": 4},
    }


def test_the_loss_of_a_domain_does_not_grow_with_its_weight():
    draw, scores = part((0, 5, 8.0, 4), (2, 9, 6.0, 3), (0, 3, 1.0, 2), (1, 4, 2.0, 3))
    factors = np.array([5.0, 0.25, 5.0, 1.0])
    weighted = draw, Scores(scores.losses * factors, scores.targets, scores.targets * factors)
    names = ("code", "none", "web")
    plain, found = domain_losses(names, [(draw, scores)]), domain_losses(names, [weighted])
    assert found.keys() == plain.keys() == set(names)
    assert [one["loss"] for one in found.values()] == pytest.approx([9 / 6, 2 / 3, 6 / 3])
    assert [one["targets"] for one in found.values()] == [6, 3, 3]


def test_targets_have_weights_of_their_own_in_the_loss_of_a_domain():
    draw, scores = part((0, 5, 3.0, 4), (1, 9, 6.0, 3), (0, 3, 1.0, 2))
    weighted = draw, scores._replace(weights=np.array([1.0, 0.0, 3.0]))
    assert domain_losses(("code", "web"), [weighted]) == {
        "code": {"loss": pytest.approx(4 / 4), "samples": 2, "tokens": 8, "targets": 6}
    }
    centred = draw, scores._replace(weights=np.array([1.0, 0.0, -1.0 + 1e-16]), divisor=2.0)
    found = domain_losses(("code", "web"), [centred])
    assert [one["loss"] for one in found.values()] == [4 / 6, 6 / 3], "no mean by weights that add up to nothing"


def test_the_loss_of_all_is_their_mean_by_weights_where_they_have_any():
    losses, targets = np.array([6.0, 3.0, 0.0]), np.array([4, 2, 3])
    assert Scores(losses, targets).loss == 9.0 / 9
    assert Scores(losses, targets, np.array([2.0, 2.5, 0.0])).loss == 9.0 / 4.5
    assert math.isnan(Scores(losses * 0, targets * 0).loss)
    assert math.isnan(Scores(losses, targets, np.zeros(3)).loss)
    assert Scores(losses, targets, np.zeros(3), divisor=4.5).loss == 9.0 / 4.5
