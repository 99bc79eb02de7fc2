"""A tenant that misbehaves is frozen and named; the others end bit by bit where they end beside one that behaves."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.slow

TWO = {"model__num_layers": 2}
BAD = 1
LAYOUTS = [
    pytest.param(1, TWO, [0, 1, 2], id="one"),
    pytest.param(2, TWO, [3, 4, "together"], id="dp2"),
    pytest.param(2, TWO, ["pairs, ring", "pairs, all_to_all", 101], id="plane2"),
    pytest.param(2, {"parallel__tp": 2, **TWO}, [0, 1, 2], id="tp2"),
    pytest.param(2, {"parallel__pp": 2}, [0, 1, 2], id="pp2"),
]
FAULTS = {
    "weights": ("not finite: loss, gradient", (0, 1, 2)),
    "activations": ("not finite: loss, gradient", (1,)),
    "rate": ("not finite: learning rate", (0, 1, 2)),
    "huge rate": ("not finite: loss, gradient", (1, 2)),
    "data": ("the data has changed: ", (1,)),
}
"""What the host says, and in which steps."""


@pytest.fixture(scope="module")
def behaving(on_ranks):
    """Results of steps in which nobody misbehaves, each computed once."""
    kept = {}

    def run(size, plans, layout):
        key = str((size, plans, layout))
        if key not in kept:
            kept[key] = on_ranks(size, "beside", how="", plans=plans, **layout)
        return kept[key]

    return run


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize(("size", "layout", "plans"), LAYOUTS)
def test_a_tenant_that_misbehaves_is_frozen_and_changes_nobody(on_ranks, behaving, size, layout, plans, how):
    _frozen(on_ranks, behaving, (size, layout, plans), how, *FAULTS[how])


def test_so_is_one_whose_weights_cancel_out(on_ranks, behaving):
    _frozen(on_ranks, behaving, LAYOUTS[1].values, "cancelling weights", "the weights of its ", (1,))


def _frozen(on_ranks, behaving, layout, how, said, when):
    size, layout, plans = layout
    results = on_ranks(size, "beside", how=how, plans=plans, **layout)
    for good, bad in zip(behaving(size, plans, layout), results, strict=True):
        for number, (row, beside) in enumerate(zip(good["rows"], bad["rows"], strict=True)):
            assert not row["failed"]
            assert beside["losses"] == row["losses"]
            assert math.isfinite(beside["loss"])
            assert math.isfinite(beside["norm"])
            if number in when:
                assert list(beside["failed"]) == [BAD]
                assert beside["failed"][BAD].startswith(said)
                assert beside["frozen"]
            else:
                assert not beside["failed"]
                assert not beside["frozen"]
        assert bad["states"] == good["states"]
