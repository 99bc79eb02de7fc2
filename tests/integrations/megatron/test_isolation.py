"""A tenant that misbehaves is frozen and named; the others end bit by bit where they end beside one that behaves."""

from __future__ import annotations

import math

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow

TWO = {"model__num_layers": 2}
BAD = 1
FAULTS = {
    "weights": ("not finite: loss, gradient", (0, 1, 2)),
    "activations": ("not finite: loss, gradient", (1,)),
    "rate": ("not finite: learning rate", (0, 1, 2)),
    "huge rate": ("not finite: loss, gradient", (1, 2)),
    "data": ("the data has changed: ", (1,)),
    "cancelling weights": ("the weights of its ", (1,)),
}
"""What the host says, and in which steps."""
LAYOUTS = {
    "one": (1, TWO, [0, 11, "packs"]),
    "dp2": (2, TWO, [5, 2, "together"]),
    "plane2": (2, TWO, ["pairs", "pairs, all_to_all", "shared 101"]),
    "tp2": (2, {"parallel__tp": 2, **TWO}, [0, 11, "packs"]),
    "pp2": (2, {"parallel__pp": 2}, [0, 11, "packs"]),
}
AT_EVERY_CHANGE = {
    "one": list(FAULTS),
    "dp2": ["data", "cancelling weights"],
    "plane2": ["activations"],
    "tp2": ["weights"],
    "pp2": ["huge rate"],
}


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        *(pytest.param(layout, faults, id=layout) for layout, faults in AT_EVERY_CHANGE.items()),
        *(only_full(layout, list(FAULTS), id=f"{layout}, all") for layout in LAYOUTS if layout != "one"),
    ],
)
def test_a_tenant_that_misbehaves_is_frozen_and_changes_nobody(on_ranks, layout, faults):
    size, changes, plans = LAYOUTS[layout]
    for behaving, *misbehaving in on_ranks(size, "beside", faults=faults, plans=plans, **changes):
        for fault, found in zip(faults, misbehaving, strict=True):
            _frozen(behaving, found, *FAULTS[fault])


def _frozen(good, bad, said, when):
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
