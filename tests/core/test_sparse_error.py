"""What is said of a sparse loss holds: its interval where errors are spread, its probability where they are rare."""

import numpy as np
import pytest
from evenload.core.corrected_mean import drawn
from evenload.core.sparse_error import SparseError, TwiceScored, together

N, RUNS, LIMIT = 300, 400, 0.002


def dense_losses(rng):
    """Sums of token losses of samples of unlike lengths."""
    return rng.uniform(2, 4, N) * rng.integers(16, 64, N)


def error(cheap, dense, seed, share=0.1):
    places = np.flatnonzero(drawn(map(str, range(N)), share, seed, least=2))
    return TwiceScored(cheap, dense[places], places, 50.0, 1000).error("sample", LIMIT, np.full(N, 0.5))


def test_intervals_cover_where_errors_are_spread():
    rng, covered = np.random.default_rng(3), 0
    for seed in range(RUNS):
        dense = dense_losses(rng)
        found = error(dense * (1 + rng.normal(4e-4, 3e-4, N)), dense, seed)
        covered += found.low <= (dense.sum() + 50) / 1000 <= found.high
    assert 0.93 <= covered / RUNS <= 0.97


@pytest.mark.parametrize(("share", "rate"), [(0.01, 0.1), (0.1, 0.1), (0.1, 0.02)])
def test_an_error_above_the_limit_in_a_share_of_samples_is_seen_as_often_as_is_said(share, rate):
    rng, again, said = np.random.default_rng(4), 0, []
    for seed in range(RUNS):
        dense, off = dense_losses(rng), rng.permutation(N) < share * N
        found = error(np.where(off, dense * 1.01, dense), dense, seed, rate)
        again += found.dense
        said.append((1 - share) ** found.drawn)
        assert found.dense == (found.worst > LIMIT)
    expected = 1 - np.mean(said)
    assert abs(again / RUNS - expected) < 3 * np.sqrt(expected * (1 - expected) / RUNS) + 0.005


def test_a_pass_that_left_nothing_out_is_dense_and_no_error_is_no_number():
    losses = TwiceScored(np.array([1.0, 2.0]), np.array([1.0]), np.array([0]))
    assert losses.error("kept", LIMIT, np.ones(2)) is None
    alone = losses.error("kept", LIMIT, np.array([0.25, 0.75]))
    assert (alone.low, alone.drawn, alone.samples, alone.kept, alone.worst, alone.dense) == (None, 1, 2, 0.5, 0, False)
    lost = losses._replace(cheap=np.array([np.nan, 2.0])).error("kept", LIMIT, np.full(2, 0.5))
    assert lost.dense, "a loss that is no number is off by more than any limit"


def test_what_is_said_names_the_chance_and_the_dense_repeat():
    one = SparseError("sample", 200, 10, 0.5, 0.001, 2.0, 2.5)
    assert "95 % in 2 to 2.5" in one.text
    assert "an error in a tenth of them goes unseen with probability 0.35" in one.text
    both = together([one, SparseError("sample", 100, 5, 0.2, 0.01, dense=True)])
    assert (both.samples, both.drawn, both.kept, both.worst, both.low) == (300, 15, pytest.approx(0.4), 0.01, None)
    assert "scored again densely" in both.text
    assert together([]) is None
