"""Sequences of a plan that continue others: which segments they are, and which plans of them are none."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan
from evenload.core.plan.trie import Branching, trie_of
from evenload.core.plan_json import read_step, step_json
from evenload.runtime.attention.pack import IGNORE, build_pack
from hypothesis import given
from hypothesis import strategies as st

ROWS = (
    [1, 2, 3, 4, 5],
    [1, 2, 3, 9, 8, 7],
    [1, 2, 6],
    [5],
)
SLICES = (Slice(0, 0, 5), Slice(1, 2, 6), Slice(2, 1, 3), Slice(3, 0, 1))
"""The last common token of two rows is in both, since it predicts another one there."""
PLAN = StepPlan(
    [len(row) for row in ROWS], (MicroBatch(SLICES, (0,)),), Limits(num_ranks=1, max_tokens=64), trunks=[0, 2, 1, 0]
)


def tokens_of(index: int) -> np.ndarray:
    return np.array(ROWS[index])


def test_a_slice_continues_the_nearest_one_before_it_that_begins_earlier():
    branching = Branching.of(SLICES)
    assert branching == Branching((1, 1, 3, 4, 2, 1), (-1, 0, 1, 1, 0, -1))
    assert branching.starts == (0, 1, 2, 2, 1, 0)
    assert branching.longest == 6


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9))
def test_slices_that_begin_where_rows_differ_from_the_one_before_are_the_trie_of_these(rows):
    rows = [list(row) for row in sorted({tuple(row) for row in rows})]
    rows = [row for row, after in zip(rows, [*rows[1:], []], strict=True) if after[: len(row)] != row]
    common = [0] + [
        next(i for i, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1) for a, b in pairwise(rows)
    ]
    slices = [Slice(number, start, len(row)) for number, (start, row) in enumerate(zip(common, rows, strict=True))]
    assert Branching.of(slices) == trie_of([np.array(row, dtype=">i8") for row in rows], worth=0).branching


def test_a_plan_with_trunks_keeps_the_laws_and_travels():
    assert check(PLAN).num_tokens == PLAN.num_padded_tokens == 12
    assert PLAN.cut == frozenset()
    again = read_step(step_json(PLAN))
    assert again.digest == PLAN.digest
    assert again.trunks.tolist() == [0, 2, 1, 0]
    assert replace(PLAN, trunks=[0, 2, 2, 0]).digest != PLAN.digest


BROKEN = {
    "a branch before its trunk": {"micro_batches": (MicroBatch((SLICES[1], SLICES[0], *SLICES[2:]), (0,)),)},
    "a branch without its trunk": {
        "micro_batches": (MicroBatch(SLICES[:1], (0,)), MicroBatch(SLICES[1:], (0,))),
    },
    "tokens that nobody computes": {"lengths": [5, 6, 4, 1]},
    "a trunk that is computed twice": {"trunks": [0, 2, 2, 0]},
    "trunks of other sequences": {"trunks": [0, 2]},
    "padded rows": {"micro_batches": (MicroBatch(SLICES, (0,), pad_to=6),)},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_plan_whose_trunks_are_not_there_is_none(changes):
    with pytest.raises(PlanError):
        check(replace(PLAN, **changes))


def test_a_pack_has_every_token_once_and_a_target_as_often_as_rows_have_it():
    pack = build_pack(PLAN.micro_batches[0], tokens_of, trunks=True)
    assert pack.tokens_T.tolist() == [1, 2, 3, 4, 5, 3, 9, 8, 7, 2, 6, 5]
    assert pack.positions_T.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 1, 2, 0]
    assert pack.labels_T.tolist() == [2, 3, 4, 5, IGNORE, 9, 8, 7, IGNORE, 6, IGNORE, IGNORE]
    assert pack.weights_T.tolist() == [3, 2, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0]
    assert pack.num_targets == sum(len(row) - 1 for row in ROWS)


def test_weights_of_a_target_that_rows_share_add_up():
    rows = ([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 7])
    slices = (Slice(0, 0, 4), Slice(1, 2, 4), Slice(2, 2, 4))
    weights = ([0.0, 2.0, 1.0, 1.0], [0.0, -1.0, 0.5, 3.0], [0.0, 1.0, 1.0, 1.0])
    pack = build_pack(
        MicroBatch(slices, (0,)), lambda i: np.array(rows[i]), weights_of=lambda i: np.array(weights[i]), trunks=True
    )
    assert pack.labels_T.tolist() == [2, 3, 4, IGNORE, 9, IGNORE, 7, IGNORE]
    assert pack.weights_T.tolist() == [2.0, 2.5, 1.0, 0.0, 3.0, 0.0, 1.0, 0.0]
    assert pack.num_targets == 9


def test_a_row_that_does_not_begin_as_the_one_it_continues_ends_the_step():
    other = {1: np.array([1, 2, 4, 9, 8, 7])}
    with pytest.raises(EvenloadError, match="sample 1 of the batch does not begin as the one that it continues"):
        build_pack(PLAN.micro_batches[0], lambda i: other.get(i, tokens_of(i)), trunks=True)
