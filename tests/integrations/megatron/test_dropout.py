"""Dropout of adapters depends on tenant, step, sample and position, and on no plan; adapters by another textbook."""

from __future__ import annotations

import numpy as np
import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

TWO = {"model__num_layers": 2}
REPLAYED = [0, 11]
LAYOUTS = [
    pytest.param(1, {"train__recompute": True}, [0], id="recompute"),
    pytest.param(2, {}, [2, "pairs"], id="dp2"),
    pytest.param(2, {"parallel__tp": 2}, [0], id="tp2"),
    pytest.param(2, {"parallel__pp": 2, "model__num_layers": 2}, [0], id="pp2"),
    only_full(1, {}, [3, 5, 8], id="one"),
    only_full(1, {"train__recompute": True}, [1], id="recompute, more"),
    only_full(2, {}, [0, 1, "shared 101"], id="dp2, more"),
    only_full(2, {"parallel__tp": 2}, [1], id="tp2, more"),
    only_full(2, {"parallel__pp": 2, "model__num_layers": 2}, [1], id="pp2, more"),
    only_full(4, {}, ["zones, remap", "growth"], id="plane4"),
]


@pytest.fixture(scope="module")
def one_rank(on_ranks):
    """Under four plans on one rank."""
    return on_ranks(1, "dropping", plans=REPLAYED, **TWO)[0]


def _same(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient - expected[name]) < 1e-9 * np.linalg.norm(expected[name]), name


def test_a_tenant_drops_in_company_what_it_drops_alone_whatever_the_plan(one_rank):
    losses, expected = one_rank["plans"][REPLAYED[0]]
    for own_losses, gradients in one_rank["plans"].values():
        assert own_losses == pytest.approx(losses, rel=1e-12)
        _same(gradients, expected)
    _same(one_rank["alone"], {name: g for name, g in expected.items() if name.startswith("0.")})


@pytest.mark.parametrize(("size", "layout", "plans"), LAYOUTS)
def test_other_layouts_and_recomputation_drop_the_same(on_ranks, one_rank, size, layout, plans):
    losses, expected = one_rank["plans"][REPLAYED[0]]
    for result in on_ranks(size, "dropping", plans=plans, **{**TWO, **layout}):
        for own_losses, gradients in result["plans"].values():
            assert own_losses == pytest.approx(losses, rel=1e-12)
            _same(gradients, expected)


def test_nothing_is_dropped_in_evaluations_and_something_in_training(on_ranks, one_rank):
    dropping, without = one_rank["scores"]
    assert dropping == without
    dry = on_ranks(1, "dropping", plans=REPLAYED[:1], share=0.0, **TWO)[0]
    losses, _ = one_rank["plans"][REPLAYED[0]]
    dry_losses, _ = dry["plans"][REPLAYED[0]]
    assert losses[0] != dry_losses[0]
    assert losses[1] != dry_losses[1]
    assert losses[2] == dry_losses[2], "the third tenant drops nothing"


@pytest.mark.parametrize("share", [only_full(0.0), 0.3])
def test_autograd_through_hooks_on_stock_layers_gives_the_same(on_ranks, share):
    for row in on_ranks(1, "against_hooks", share=share, plans=[1], **TWO)[0]:
        assert row["loss"] < 1e-12
        assert row["grad"] < 1e-9
