"""Drawn weights of targets: of every sign and 0, the same for the same batch, and never such that they cancel out."""

import numpy as np
import pytest
from evenload.runtime.attention.labels import count_targets, loss_divisor, weighed
from evenload.runtime.attention.pack import IGNORE
from evenload.training.proof.masking import half_masked
from evenload.training.proof.weighing import KINDS, drawn_weights, scale_of

LENGTHS = np.random.default_rng(0).integers(1, 60, 64)
BY = KINDS[:2]
TOKENS = [np.random.default_rng(n).integers(0, 97, n) for n in LENGTHS]


def weights_of(labels):
    """The weights of each sequence's targets."""
    targets = [labels.of(i)[1:] != IGNORE for i in range(len(labels.targets))]
    return [labels.weights.of(i)[1:][target].tolist() for i, target in enumerate(targets)]


@pytest.mark.parametrize("by", BY)
def test_weights_have_every_sign_and_zeros_are_no_targets(by):
    labels = drawn_weights(None, TOKENS.__getitem__, LENGTHS, by, [1])
    rows = weights_of(labels)
    assert [len(row) for row in rows] == labels.targets.tolist()
    assert 0 < count_targets(LENGTHS, labels) < count_targets(LENGTHS)
    drawn = [weight for row in rows for weight in row]
    assert min(drawn) < 0 < max(drawn)
    assert 0 not in drawn
    assert {len(set(row)) > 1 for row in rows if len(row) > 1} == {by == "token"}
    assert labels.weights.sums == pytest.approx([sum(row) for row in rows], abs=1e-12)
    assert loss_divisor(LENGTHS, labels) == pytest.approx(sum(drawn), abs=1e-9)
    assert weights_of(drawn_weights(None, TOKENS.__getitem__, LENGTHS, by, [1])) == rows
    assert weights_of(drawn_weights(None, TOKENS.__getitem__, LENGTHS, by, [2])) != rows


@pytest.mark.parametrize("by", BY)
def test_no_tenants_weights_cancel_out(by):
    tenants = np.arange(64) % 20
    for seed in range(8):
        labels = drawn_weights(None, TOKENS.__getitem__, LENGTHS, by, [seed], tenants)
        for tenant in range(20):
            own = labels.weights.sums[tenants == tenant]
            assert abs(own.sum()) > 0.1 * np.abs(own).sum() > 0


def test_what_is_masked_afterwards_keeps_its_weights():
    labels = drawn_weights(None, TOKENS.__getitem__, LENGTHS, "token", [1])
    masked = half_masked(labels, TOKENS.__getitem__, np.arange(64), LENGTHS, 3)
    assert 0 < masked.targets.sum() < labels.targets.sum()
    for one, all_of in zip(weights_of(masked), weights_of(labels), strict=True):
        assert set(one) <= set(all_of)
    assert masked.weights.sums == pytest.approx([sum(row) for row in weights_of(masked)], abs=1e-12)


@pytest.mark.parametrize("tenants", [None, np.minimum(np.arange(64), 9)])
@pytest.mark.parametrize("masked", [False, True])
def test_centred_weights_add_up_to_nothing_and_have_a_divisor(tenants, masked):
    for seed in range(20):
        known = half_masked(None, TOKENS.__getitem__, np.arange(64), LENGTHS, seed) if masked else None
        labels = drawn_weights(known, TOKENS.__getitem__, LENGTHS, "centred", [seed], tenants)
        assert count_targets(LENGTHS, labels) == count_targets(LENGTHS, known)
        for tenant in [0] if tenants is None else range(10):
            places = np.arange(64) if tenants is None else np.flatnonzero(tenants == tenant)
            own = np.concatenate([weights_of(labels)[place] for place in places])
            assert abs(own.sum()) <= 1e-12 * np.abs(own).sum() or own.tolist() == [1.0]
            assert len(own) < 2 or min(own) < 0 < max(own)
            divisor = labels.weights.divisor_of(places, tenant)
            assert 1 < divisor != round(divisor)
    scale = np.abs([weight for row in weights_of(labels) for weight in row]).sum()
    if tenants is None:
        assert scale_of(labels, LENGTHS) == pytest.approx(scale / loss_divisor(LENGTHS, labels))
    assert scale_of(drawn_weights(None, TOKENS.__getitem__, LENGTHS, "token", [1]), LENGTHS) == 0.0


@pytest.mark.parametrize("by", KINDS)
def test_a_divisor_of_the_data_stays_under_other_weights_and_a_mask(by):
    known = weighed(None, TOKENS.__getitem__, LENGTHS, lambda index: np.ones(LENGTHS[index]), 7.25)
    masked = half_masked(known, TOKENS.__getitem__, np.arange(64), LENGTHS, 3)
    assert masked.weights.divisor == 7.25
    assert loss_divisor(LENGTHS, drawn_weights(masked, TOKENS.__getitem__, LENGTHS, by, [1])) == 7.25
