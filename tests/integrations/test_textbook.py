"""What proofs measure with: the textbook optimizer is torch's, and no error is small that is not a number."""

from __future__ import annotations

import math

import pytest
import torch
from evenload.core.recipe.sections import Train
from evenload.integrations.reference.exactness import Worst, largest_error, not_finite, relative_error
from evenload.integrations.reference.textbook import AdamW
from torch.nn.utils import clip_grad_norm_


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_textbook_is_torchs_adamw_with_torchs_clipping(clip: float, decay: float) -> None:
    torch.manual_seed(1)
    weights = {
        name: torch.randn(*shape, dtype=torch.float64) for name, shape in {"matrix": (3, 4), "norm": (5,)}.items()
    }
    parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    groups = [
        {"params": [parameters["matrix"]], "weight_decay": decay},
        {"params": [parameters["norm"]], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.0)
    ours = AdamW.of(weights, Train(clip_grad=clip, weight_decay=decay))
    for step in range(4):
        gradients = {name: torch.randn_like(weight) * 0.1**step for name, weight in weights.items()}
        norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        if clip:
            clip_grad_norm_(parameters.values(), clip)
        for group in theirs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        theirs.step()
        ours.step(gradients, norm, 0.01 * (step + 1))
        for name, parameter in parameters.items():
            state = theirs.state[parameter]
            torch.testing.assert_close(ours.states[name].weight, parameter.detach(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(ours.states[name].exp_avg, state["exp_avg"], rtol=1e-12, atol=1e-16)
            torch.testing.assert_close(ours.states[name].exp_avg_sq, state["exp_avg_sq"], rtol=1e-12, atol=1e-16)
    assert not torch.equal(ours.states["matrix"].weight, weights["matrix"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_wrong(value: float) -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, value, 1.0])
    assert relative_error(bad, good) == math.inf
    assert relative_error(good, bad) == math.inf
    assert relative_error(bad, bad) == math.inf
    names = [f"p{k}" for k in range(5)]
    for place in range(5):  # wherever it stands among the others
        values = {name: bad if k == place else good for k, name in enumerate(names)}
        assert largest_error(values, dict.fromkeys(names, good)) == Worst(math.inf, f"p{place}")
        assert not_finite(values) == [f"p{place}"]


def test_errors_are_relative_and_absolute_where_there_is_nothing() -> None:
    assert relative_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == pytest.approx(1.0)
    assert relative_error(torch.tensor([3.0]), torch.tensor([0.0])) == 3.0
    assert largest_error({"a": torch.ones(1)}, {}) == Worst(math.inf, "a")
    assert largest_error({}, {}) == Worst()
