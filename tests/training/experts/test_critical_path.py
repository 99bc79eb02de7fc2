"""The critical path waits for the busiest rank of every stretch, not of the sum."""

from evenload.training.experts.critical_path import longest


def test_ranks_that_are_busy_in_turn_look_even_in_the_sum_and_are_not():
    assert longest([((0, 0), [3.0, 1.0]), ((0, 0), [1.0, 3.0])]) == (6.0, 5.0, 4.0)


def test_the_group_that_takes_longest_counts():
    rows = [((0, 0), [1.0, 1.0]), ((0, 1), [2.0]), ((0, 0), [1.0, 2.0]), ((0, 1), [4.0]), ((1, 0), [0.5, 0.5])]
    assert longest(rows) == (4.0, 4.0, 3.0)
