"""Loads of ranks and stages as one table of counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from evenload.commands._shared import expert_loads
from evenload.commands._shared.expert_loads import counts_of, metrics_of
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


def test_metrics_are_of_all_ranks_layers_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[Any] = [
        [Load(0, 0, (1, 1), 1.5, 1.0, 2, 100, 0.25), Load(0, 1, (1, 1), 2.0, 1.25)],
        [Load(0, 0, (1, 1), 1.5, 1.0, 2, 300, 0.5), Load(0, 1, (1, 1), 2.0, 1.25, 0, 0, 0.125)],
        [],  # a rank whose stage has no experts
    ]

    def gathered(own: Any) -> list[Any]:
        assert own.tolist() == [list(load[3:]) for load in ranks[0]]
        return [own, *(np.array([load[3:] for load in loads], dtype=float) for loads in ranks[1:])]

    monkeypatch.setattr(expert_loads, "everyone", gathered)
    assert metrics_of(SimpleNamespace(expert_loads=ranks[0])) == {  # type: ignore[arg-type]
        "imbalance_p50": 1.75,
        "imbalance_p95": 2.0,
        "imbalance_max": 2.0,
        "imbalance_after_p50": 1.125,
        "imbalance_after_p95": 1.25,
        "imbalance_after_max": 1.25,
        "copies": 1.0,
        "copied_bytes": 400.0,
        "exposed_s": 0.625,
    }
    monkeypatch.setattr(expert_loads, "everyone", lambda own: [own, own])
    assert metrics_of(SimpleNamespace(expert_loads=())) is None  # type: ignore[arg-type]
