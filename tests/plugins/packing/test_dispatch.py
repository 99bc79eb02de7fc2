"""Sequences to ranks by slots: all of them once, outliers on ranks of their own, no rank much over its capacity."""

import numpy as np
import pytest
from evenload.plugins.packing.dispatch import dispatch, slots


def test_an_outlier_has_a_rank_of_its_own_with_as_many_slots_as_it_costs():
    rows = np.array([[90.0, *[5.0] * 24]])
    (own,) = slots(rows, 4, 2)
    assert own.own == 1
    assert own.counts[0] > 2
    assert own.counts[1:] == [2, 2, 2]
    assert float(own.capacity.sum()) >= float(rows.sum())
    ranks = dispatch(rows, [own])
    assert ranks[0] == [0], "nothing more beside it: it is over the mean already"


@pytest.mark.parametrize("directions", [1, 2])
def test_every_sequence_is_on_one_rank_and_ranks_are_even(directions):
    seconds = np.sort(np.random.default_rng(1).lognormal(0, 1, 200))[::-1]
    rows = np.array([seconds, 2 * seconds + 0.1])[:directions]
    room = slots(rows, 8, 2)
    ranks = dispatch(rows, room)
    assert sorted(i for mine in ranks for i in mine) == list(range(200))
    for row, each in zip(rows, room, strict=True):
        loads = np.array([row[mine].sum() for mine in ranks])
        assert (loads <= each.capacity * 1.03).all()
