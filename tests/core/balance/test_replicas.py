"""Dealing to replicas of unlike kinds: against brute force and HiGHS, and laws by hypothesis."""

from itertools import product

import numpy as np
import pytest
from evenload.benchmarks.planning.dealing import SETTINGS, seconds_of
from evenload.core.balance.replicas import bound_of, deal
from evenload.core.errors import EvenloadError
from hypothesis import given
from hypothesis import strategies as st

from .by_solver import least_end_s


def drawn(seed, sequences, kinds, replicas):
    """Seconds with places where nothing fits, fixed seconds, and the kind of each replica."""
    random = np.random.default_rng(seed)
    kind_of = np.concatenate([np.arange(kinds), random.integers(0, kinds, replicas)])
    some = random.lognormal(0, 1, (sequences, kinds)), random.integers(1, 5, (sequences, kinds)).astype(float)
    seconds = some[seed % 2]
    lost = random.random(seconds.shape) < 0.25
    lost[np.arange(sequences), random.integers(0, kinds, sequences)] = False
    seconds[lost] = np.inf
    return seconds, random.random(kinds) * random.integers(0, 2), kind_of


def ends_of(seconds, fixed_s, kind_of, replica_of):
    ends = fixed_s[kind_of].astype(float)
    for sequence, replica in enumerate(replica_of):
        ends[replica] += seconds[sequence, kind_of[replica]]
    return ends


@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(1, 3), st.integers(0, 1))
def test_few_sequences_end_as_early_as_they_can(seed, sequences, kinds, more):
    seconds, fixed_s, kind_of = drawn(seed, sequences, kinds, more)
    every = product(range(len(kind_of)), repeat=sequences)
    least_s = min(float(ends_of(seconds, fixed_s, kind_of, one).max()) for one in every)
    dealt = deal(seconds, fixed_s, kind_of)
    assert dealt.step_s == pytest.approx(least_s, rel=1e-9)
    assert dealt.bound_s <= least_s * (1 + 1e-9)


@given(st.integers(0, 10**6), st.integers(1, 80), st.integers(1, 4), st.integers(0, 9))
def test_each_sequence_goes_once_to_where_it_fits_and_order_does_not_matter(seed, sequences, kinds, more):
    seconds, fixed_s, kind_of = drawn(seed, sequences, kinds, more)
    dealt = deal(seconds, fixed_s, kind_of)
    assert dealt.replica_of.shape == (sequences,)
    ends = ends_of(seconds, fixed_s, kind_of, dealt.replica_of)
    assert np.isfinite(ends).all()
    assert dealt.seconds == pytest.approx(ends, rel=1e-9)
    assert dealt.bound_s <= dealt.step_s * (1 + 1e-9)
    order = np.random.default_rng(seed).permutation(sequences)
    again = deal(seconds[order], fixed_s, kind_of)
    for replica in range(len(kind_of)):
        here, there = seconds[dealt.replica_of == replica], seconds[order][again.replica_of == replica]
        assert sorted(map(tuple, here)) == sorted(map(tuple, there))


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_that_of_the_linear_program(seed):
    seconds, fixed_s, kind_of = drawn(seed, 40, 1 + seed % 4, 5)
    least_s = least_end_s(seconds, fixed_s, kind_of, whole=False)
    alone_s = float((seconds + fixed_s).min(axis=1).max())
    bound_s = bound_of(seconds, fixed_s, np.bincount(kind_of))
    assert bound_s == pytest.approx(max(least_s, alone_s, fixed_s.max()), rel=2e-5)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_settings_of_lobra_are_dealt_near_the_linear_program(setting):
    dealt = deal(*seconds_of(setting, seed=0))
    assert dealt.step_s <= 1.03 * dealt.bound_s


def test_the_replicas_of_a_thousand_ranks_end_together():
    few_lengths = np.tile(np.repeat(np.arange(1.0, 129.0), 8), 8)
    slower = np.stack([2 * few_lengths, np.where(few_lengths < 64, few_lengths, np.inf)], axis=1)
    dealt = deal(slower, np.zeros(2), np.repeat([0, 1], [256, 512]))
    assert dealt.step_s <= 1.03 * dealt.bound_s


def test_a_sequence_that_fits_nowhere_is_refused():
    with pytest.raises(EvenloadError, match=r"(?s)fits on no replica.*number 1"):
        deal(np.array([[1.0, 2.0], [np.inf, np.inf]]), np.zeros(2), np.array([0, 1]))
