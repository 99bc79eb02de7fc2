"""Loads of ranks and stages as one table of counts."""

from __future__ import annotations

from evenload.commands._shared.expert_loads import counts_of
from evenload.runtime.experts.gate import Load


def test_counts_stand_by_round_layer_rank_and_expert() -> None:
    rows = [
        (0, [Load(0, 1, (3, 1), 1.0, 1.0), Load(2, 1, (0, 2), 1.0, 1.0)]),
        (1, [Load(0, 1, (5, 0), 1.0, 1.0), Load(3, 1, (1, 1), 1.0, 1.0)]),
        (0, [Load(1, 3, (2, 2), 1.0, 1.0), Load(4, 3, (1, 0), 1.0, 1.0)]),  # the next pipeline stage
        (1, [Load(1, 3, (0, 4), 1.0, 1.0)]),
    ]
    counts, layers = counts_of(rows, 2)
    assert layers == [1, 3]
    assert counts.tolist() == [[[[3, 1], [5, 0]], [[2, 2], [0, 4]]], [[[0, 2], [1, 1]], [[1, 0], [0, 0]]]]
