"""As many micro-batches on every rank as a script runs: real ones where there are samples, and never slower for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evenload.core.costs.costs import from_totals
from evenload.core.errors import EvenloadError
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.integrations.unmodified.exact_number import into_exactly
from hypothesis import given
from hypothesis import strategies as st

COSTS = from_totals("test", token_s=1.0, square_s=0.01, launch_s=3.0)


def _plan(packs_of_ranks, *, together=False, pad_to=0):
    lengths, micro_batches = [], []
    for rank, packs in enumerate(packs_of_ranks):
        for pack in packs:
            slices = tuple(Slice(len(lengths) + place, 0, length) for place, length in enumerate(pack))
            lengths += pack
            micro_batches.append(MicroBatch(slices, (rank,), pad_to))
    limits = Limits(len(packs_of_ranks), 10_000, all_in_step=together)
    return StepPlan(as_lengths(lengths), tuple(micro_batches), limits)


def _step_s(rows, together):
    each = [[sum(COSTS.micro_batch_s(m)) for m in row] for row in rows]
    return sum(max(column) for column in zip(*each, strict=True)) if together else max(map(sum, each))


def _lengths(rows):
    return [[sorted(piece.length for piece in m.slices) for m in row] for row in rows]


packs = st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=5), min_size=0, max_size=4)


@given(st.lists(packs, min_size=1, max_size=4).filter(any), st.booleans())
def test_real_micro_batches_are_never_slower_and_nothing_is_lost(packs_of_ranks, together):
    plan = _plan(packs_of_ranks, together=together)
    rows = into_exactly(plan, 4, COSTS)
    assert {len(row) for row in rows} == {4}
    assert sorted(piece for row in rows for m in row for piece in m.slices) == [
        Slice(number, 0, int(length)) for number, length in enumerate(plan.lengths)
    ]
    assert all(m.ranks == (rank,) for rank, row in enumerate(rows) for m in row)
    dummies = [
        [m for m in plan.micro_batches if m.ranks == (rank,)] + [MicroBatch((), (rank,))] * (4 - len(packs))
        for rank, packs in enumerate(packs_of_ranks)
    ]
    assert _step_s(rows, together) <= _step_s(dummies, together) * (1 + 1e-12)
    for row, packs in zip(rows, packs_of_ranks, strict=True):
        real = [bool(m.slices) for m in row]
        assert real == sorted(real, reverse=True), "dummies are last"
        if not together:
            assert sum(real) == min(4, sum(map(len, packs)))


def test_the_costliest_micro_batch_is_cut_between_samples():
    rows = into_exactly(_plan([[[40, 9, 31], [50]], [[60], [70]]]), 3, COSTS)
    assert _lengths(rows) == [[[50], [40], [9, 31]], [[70], [60], []]]


def test_ranks_in_step_keep_dummies_where_real_ones_are_slower():
    # Cut, the second rank runs 50, 50 and 50 beside 100, 100 and a dummy; 100 and 100 side by side wait for nothing.
    packs = [[[100], [100]], [[100], [50, 50]]]
    assert _lengths(into_exactly(_plan(packs, together=True), 3, COSTS))[1] == [[100], [50, 50], []]
    assert _lengths(into_exactly(_plan(packs), 3, COSTS))[1] == [[100], [50], [50]]


def test_padding_is_not_for_packs():
    rows = into_exactly(_plan([[[3, 5]]], pad_to=8), 1, COSTS)
    assert [m.pad_to for row in rows for m in row] == [0]


def test_what_a_loop_cannot_run_is_refused():
    plan = _plan([[[4], [4], [4]], [[4]]])
    with pytest.raises(EvenloadError, match=r"gradient_accumulation_steps to 3, or packing\.max_tokens"):
        into_exactly(plan, 2, COSTS)
    with pytest.raises(EvenloadError, match="decides itself what is recomputed"):
        into_exactly(replace(plan, recompute=((1, 0, 0, 0),)), 4, COSTS)
