"""Sequences on ranks: every one placed, none over the cap, and as even as the target says."""

import numpy as np
import pytest
from evenload.plugins.mesh.assign import Frame, columns_for, on_ranks, placed, target_of
from evenload.plugins.mesh.cost_table import SequenceCosts, most_tokens

DEGREES = np.array([1, 2, 4], dtype=np.int64)


def shares(lengths, exposed_s=0.0):
    """A second for each token, divided among ranks; ``exposed_s`` more for what is shared, half in each direction."""
    n = np.array(lengths, dtype=np.int64)
    each = n[:, None] / DEGREES / 2 + np.where(DEGREES > 1, exposed_s / 2, 0.0)
    tokens = np.stack([most_tokens(n, int(d)) for d in DEGREES], axis=1)
    return SequenceCosts(DEGREES, tokens, each, each.copy(), np.zeros_like(tokens))


def test_a_sequence_gets_the_least_rank_seconds_within_the_target_or_the_fastest_degree():
    costs = shares([100], exposed_s=10.0)
    numbers = np.array([0])
    assert [int(columns_for(costs, numbers, target)[0][0]) for target in (100.0, 70.0, 50.0, 1.0)] == [0, 1, 2, 2]


def test_the_target_is_what_all_ranks_take_together():
    even = shares([40, 40, 40, 40])
    assert target_of(even, np.arange(4), 4, 1.0) == pytest.approx(40.0)
    alone = shares([1000, 8, 8], exposed_s=0.0)
    assert target_of(alone, np.arange(3), 4, 1.0) == pytest.approx(1016 / 4, rel=1e-2)


def test_all_sequences_are_placed_and_loads_are_what_their_ranks_add_up_to():
    lengths = [400, 200, 90, 80, 70, 60, 50, 30, 20]
    costs = shares(lengths, exposed_s=1.0)
    result = placed(costs, np.arange(len(lengths)), Frame(4, 4, 1000.0))
    forward, tokens = np.zeros(4), np.zeros(4, dtype=np.int64)
    for k, ranks in enumerate(result.cp_groups):
        column = int(result.columns[k])
        assert len(set(ranks)) == len(ranks) == DEGREES[column]
        forward[list(ranks)] += costs.forward[k, column]
        tokens[list(ranks)] += costs.tokens[k, column]
    assert np.allclose(forward, result.forward)
    assert (tokens == result.tokens).all()
    assert result.seconds <= 1.1 * sum(lengths) / 4


def test_a_rank_holds_no_more_than_the_cap_and_what_fits_nowhere_is_said():
    costs = shares([100, 100, 100])
    single = np.zeros(3, dtype=np.int64)
    result = on_ranks(costs, np.arange(3), single, Frame(2, 2, 180.0))
    assert result is not None, "the third one is shared instead"
    assert result.tokens.max() <= 180
    assert on_ranks(costs, np.arange(3), single, Frame(2, 2, 120.0)) is None


def test_a_group_that_a_node_could_hold_stays_inside_one():
    costs = shares([400, 400, 5, 5])
    result = on_ranks(costs, np.arange(4), np.array([1, 1, 0, 0]), Frame(6, 3, 1e9))
    assert all(len({rank // 3 for rank in ranks}) == 1 for ranks in result.cp_groups)
