"""The cost model: its arithmetic, its fit, its presets."""

from __future__ import annotations

import numpy as np
import pytest
from evenload.core import cluster, costs
from evenload.core.costs import Costs, PassCost, fit, from_totals
from evenload.core.errors import EvenloadError
from evenload.core.layout import Layout
from evenload.core.setting import RECIPES
from evenload.core.workload import MicroBatch, Slice
from hypothesis import given
from hypothesis import strategies as st

SOME = Costs(
    source="test",
    forward=PassCost(launch_s=1e-3, token_s=2e-6, pair_s=3e-9),
    backward=PassCost(launch_s=2e-3, token_s=4e-6, pair_s=7.5e-9),
)


@given(st.integers(2, 5000), st.integers(1, 4999))
def test_slices_cost_what_the_whole_costs(length: int, cut: int) -> None:
    """Attention of [0, n) is that of [0, c) plus that of [c, n) with its prefix."""
    cut = min(cut, length - 1)
    whole = SOME.forward.seconds(length)
    parts = SOME.forward.seconds(cut) + SOME.forward.seconds(length - cut, cut)
    assert parts == pytest.approx(whole, rel=1e-12)


def test_published_totals_are_met() -> None:
    """FlexSP's coefficients are totals of forward and backward: a1 s^2 + a2 s + b1."""
    model = from_totals("test", token_s=0.18396e-3, square_s=5.128e-9, launch_s=0.6294)
    length = np.array([1000, 100_000])
    expected = 5.128e-9 * length.astype(float) ** 2 + 0.18396e-3 * length
    assert model.sequence_s(length) == pytest.approx(expected, rel=1e-12)
    assert model.launch_s == pytest.approx(0.6294)


def test_a_micro_batch_pays_its_padding_and_shares_its_ranks() -> None:
    slices = (Slice(0, 0, 10), Slice(1, 0, 30))
    packed, _ = SOME.micro_batch_s(MicroBatch(slices, (0,)))
    padded, _ = SOME.micro_batch_s(MicroBatch(slices, (0,), pad_to=30))
    shared, _ = SOME.micro_batch_s(MicroBatch(slices, (0, 1)))
    assert packed == pytest.approx(1e-3 + 2e-6 * 40 + 3e-9 * (50 + 450))
    assert padded == pytest.approx(1e-3 + 2e-6 * 60 + 3e-9 * 900)
    assert shared - 1e-3 == pytest.approx((packed - 1e-3) / 2)


def test_a_stage_has_its_share() -> None:
    stage = SOME.of_stage(Layout(tp=2, pp=4))
    assert stage.forward.token_s == pytest.approx(SOME.forward.token_s / 8)
    assert stage.forward.launch_s == pytest.approx(SOME.forward.launch_s / 4)


@given(st.floats(1e-5, 1e-2), st.floats(1e-8, 1e-5), st.floats(1e-12, 1e-9))
def test_fit_recovers_exact_coefficients(launch_s: float, token_s: float, pair_s: float) -> None:
    true = PassCost(launch_s=launch_s, token_s=token_s, pair_s=pair_s)
    work = [(n * k, k * n * n / 2) for n in (64, 256, 1024, 4096) for k in (1, 2, 4)]
    found, error = fit(work, [true.launch_s + true.token_s * t + true.pair_s * p for t, p in work])
    assert error < 1e-6
    for name in ("launch_s", "token_s", "pair_s"):
        value = getattr(true, name)
        share = value * {"launch_s": 1, "token_s": 16384, "pair_s": 4 * 4096**2 / 2}[name] / true.seconds(16384)
        assert getattr(found, name) == pytest.approx(value, rel=1e-4) or share < 1e-6


def test_fit_never_gives_a_negative_cost() -> None:
    found, _ = fit([(100, 10), (200, 40), (400, 160)], [1.0, 1.5, 1.9])
    assert min(found.launch_s, found.token_s, found.pair_s) >= 0


@pytest.mark.parametrize("path", sorted((RECIPES / "costs").glob("*.yaml")), ids=lambda p: p.stem)
def test_presets_load_and_name_their_source(path: object) -> None:
    model = costs.load(str(path), RECIPES / "costs")
    assert len(model.source) > 20
    assert model.backward.token_s >= model.forward.token_s


@pytest.mark.parametrize("path", sorted((RECIPES / "clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_clusters_load(path: object) -> None:
    machines = cluster.load(str(path), RECIPES / "clusters")
    assert machines.intra.bytes_per_s >= machines.inter.bytes_per_s
    assert machines.link_among(range(machines.ranks_per_node)) == machines.intra
    assert machines.link_among(range(machines.ranks_per_node + 1)) == machines.inter
    assert machines.intra.all_reduce_s(1e6, 2) > 0
    assert machines.intra.all_gather_s(1e6, 1) == 0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(EvenloadError, match="did you mean 'local'"):
        cluster.load("locl", RECIPES / "clusters")
    with pytest.raises(EvenloadError, match="no such cost model"):
        costs.load("nonsense", RECIPES / "costs")
