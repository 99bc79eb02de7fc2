"""An objective of domains as weights of their sequences: the sum of mean losses, in value and gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evenload.core.policies import objective_weights


@pytest.mark.parametrize("seed", range(20))
def test_weighted_sums_are_the_sum_of_the_domains_mean_losses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    domain, targets = np.append(rng.integers(0, 4, 20), [0, 1, 2, 3]), rng.integers(1, 50, 24)
    objective = rng.dirichlet(np.ones(4))
    losses = [torch.rand(n, dtype=torch.float64, requires_grad=True) for n in targets]
    weights = objective_weights(tuple(objective), domain, targets.astype(float))
    own = sum(w * loss.sum() for w, loss in zip(weights, losses, strict=True)) / (weights * targets).sum()
    means = [torch.cat([loss for loss, d in zip(losses, domain, strict=True) if d == k]).mean() for k in range(4)]
    wanted = sum(part * mean for part, mean in zip(objective, means, strict=True))
    assert own.item() == pytest.approx(wanted.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(own, losses), torch.autograd.grad(wanted, losses), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert (weights * targets).sum() == pytest.approx(targets.sum(), rel=1e-12), "as large as that of a mean"


def test_what_is_not_in_a_batch_takes_nothing_from_the_others() -> None:
    weights = objective_weights((0.5, 0.3, 0.2), np.array([0, 2, 2]), np.array([10.0, 4.0, 1.0]))
    assert weights == pytest.approx([0.5 / 0.7 * 15 / 10, 0.2 / 0.7 * 15 / 5, 0.2 / 0.7 * 15 / 5])
    assert not objective_weights((0.0, 1.0), np.array([0, 0]), np.array([3.0, 4.0])).any()
    negative = objective_weights((0.5, 0.5), np.array([0, 1]), np.array([-3.0, 4.0]))
    assert negative.tolist() == [0.0, 1.0], "weights of the data that add up to less than nothing"
