"""Three tenants in company, each against plain training of it alone: whole sequences, stock layers, textbook LoRA."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from harness.cases import only_full
from harness.proof.tenants import TENANTS
from hypothesis import HealthCheck, given, settings

pytestmark = pytest.mark.slow

TWO = {"model__num_layers": 2}
"""Two layers a stage, as in two stages of the model of four layers."""
LAYOUTS = [
    pytest.param(1, TWO, [0, 11, 2, "packs"], id="one"),
    pytest.param(2, TWO, [5], id="dp2"),
    pytest.param(2, {"parallel__tp": 2, **TWO}, [11], id="tp2"),
    pytest.param(2, {"parallel__pp": 2}, [0], id="pp2"),
    only_full(2, TWO, [0, 1, 2, 3], id="dp2, all"),
    only_full(2, {"parallel__tp": 2, **TWO}, [0, 1, 2, 3], id="tp2, all"),
    only_full(2, {"parallel__pp": 2}, [0, 1, 2, 3], id="pp2, all"),
    only_full(4, {"parallel__tp": 2, "parallel__pp": 2}, [4, 5], id="tp2pp2"),
]
SHARED = [
    pytest.param(2, TWO, ["pairs", "pairs, all_to_all"], id="plane2"),
    only_full(2, TWO, ["together", "shared 100", "shared 101"], id="plane2, more"),
    pytest.param(4, TWO, ["hybrid", "growth"], id="plane4"),
    only_full(4, TWO, ["ring", "all_gather", "all_to_all", "zones, remap", "chain"], id="plane4, more"),
    pytest.param(4, {"parallel__tp": 2, **TWO}, ["shared 102"], id="tp2"),
    only_full(4, {"parallel__tp": 2, **TWO}, ["pairs, all_to_all"], id="tp2, more"),
    only_full(4, {"parallel__pp": 2}, ["pairs", "shared 103"], id="pp2"),
]


def _exact(results):
    """Every tenant under every plan gave what it gives alone, and no weight of the base has moved."""
    for rows, moved in results:
        assert moved == []
        for row in rows:
            assert row["loss"] < 1e-12, row
            assert row["grad"] < 1e-9, row
            assert not row["missing"], row
            assert not row["failed"], row


@pytest.mark.parametrize(("size", "layout", "plans"), LAYOUTS)
def test_random_plans_give_each_tenant_what_it_gets_alone(on_ranks, size, layout, plans):
    _exact(on_ranks(size, "in_company", plans=plans, **layout))


@pytest.mark.parametrize(("size", "layout", "plans"), SHARED)
def test_so_do_micro_batches_that_ranks_share(on_ranks, size, layout, plans):
    _exact(on_ranks(size, "in_company", plans=plans, **layout))


@pytest.mark.parametrize("tenants", [TENANTS, (0,) * len(TENANTS)], ids=["in company", "alone"])
@pytest.mark.parametrize(("size", "layout"), [(2, TWO), (2, {"parallel__tp": 2, **TWO}), (2, {"parallel__pp": 2})])
@pytest.mark.full
def test_weights_that_add_up_to_0_train_by_the_divisor_of_their_tenant(on_ranks, size, layout, tenants):
    _exact(on_ranks(size, "in_company", plans=[0, 3], tenants=tenants, drawings=20, **layout))


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, TWO, id="one"),
        only_full(2, {"parallel__tp": 2, **TWO}, id="tp2"),
        only_full(2, {"parallel__pp": 2}, id="pp2"),
    ],
)
def test_so_it_is_when_the_recipe_recomputes_every_layer(on_ranks, size, layout):
    drawn = {"recompute": False}
    _exact(on_ranks(size, "in_company", plans=[0, 11], drawn=drawn, train__recompute=True, **layout))


def test_so_it_is_where_weight_gradients_are_passes_of_their_own(on_ranks):
    drawn = {"splits": True, "asymmetric": False, "replay": "some"}
    _exact(on_ranks(2, "in_company", plans=[2], drawn=drawn, parallel__pp=2))


@pytest.mark.parametrize("family", ["gpt", only_full("qwen2"), "qwen3"])
def test_every_family(on_ranks, family):
    _exact(on_ranks(1, "in_company", plans=[2], model__family=family, **TWO))


@pytest.mark.parametrize(
    ("size", "layout", "plans"),
    [
        pytest.param(1, TWO, [0, 11, "packs"], id="one"),
        pytest.param(2, TWO, [5, 2, 8], id="dp2"),
        only_full(4, TWO, ["chain", 3, "zones"], id="dp4"),
        only_full(4, {"parallel__tp": 2, "parallel__pp": 2}, [1, 2, 3], id="tp2pp2"),
        pytest.param(4, {"parallel__tp": 2, **TWO}, [5, 2, "packs"], id="dp2tp2"),
    ],
)
def test_three_steps_move_adapters_as_a_textbook_does(on_ranks, size, layout, plans):
    for result in on_ranks(size, "three_steps", plans=plans, **layout):
        assert result["loss"] < 1e-9
        assert result["norm"] < 1e-9
        assert result["weights"] < 1e-7
        assert result["first"] < 1e-9
        assert result["second"] < 1e-9
        assert result["kept"], "a step without a tenant has changed its adapter"
        assert result["steps"] == [3, 2, 3]
        assert result["moved"] == []


@pytest.mark.parametrize(
    ("size", "steps"), [pytest.param(2, 20, id="dp2"), only_full(1, 200, id="one"), only_full(2, 40, id="dp2, longer")]
)
def test_tenants_come_and_go_for_long_and_leave_nothing_behind(on_ranks, size, steps):
    for result in on_ranks(size, "soak", seed=5, steps=steps, model__num_layers=1):
        assert result["tenants"] > steps // 12
        assert result["failed"] >= steps // 100
        assert result["after"] == result["before"]
        assert result["closed"] == 0
        assert result["worst"] < 1e-9


@pytest.mark.parametrize("size", [2, only_full(4)])
def test_a_tenant_may_adapt_layers_of_one_stage_alone(on_ranks, size):
    whole = on_ranks(1, "on_one_stage")[0]
    assert len(whole["weights"]) == 2
    for part in on_ranks(size, "on_one_stage", parallel__pp=2):
        assert part["losses"] == pytest.approx(whole["losses"], rel=1e-12)
        assert part["norms"] == pytest.approx(whole["norms"], rel=1e-9)
        for name, weight in whole["weights"].items():
            assert part["weights"][name] == pytest.approx(weight, rel=1e-9, abs=1e-15)


@settings(
    max_examples=max(1, settings.default.max_examples // 60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_whoever_comes_and_goes_trains_as_alone(on_ranks, seed):
    (result,) = on_ranks(1, "soak", seed=seed, steps=12, model__num_layers=1)
    assert result["after"] == result["before"]
    assert result["worst"] < 1e-9
