"""The chain of planners for loops that are not ours."""

from __future__ import annotations

import pytest
from evenload.core.chain import PlanChain
from evenload.core.errors import EvenloadError
from evenload.core.recipe import parse
from evenload.core.workload import sequences
from evenload.face import load_plugins

load_plugins()


def recipe(**packing: object) -> object:
    return parse({"parallel": {"dp": 2}, "plugins": {"packing": {"enabled": True, "max_tokens": 64, **packing}}})


def test_a_loop_of_ones_own_runs_whole_sequences_and_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    asks = recipe(slices="even", max_delay_steps=3)
    with caplog.at_level("WARNING", logger="evenload"):
        chain = PlanChain.of_loop(asks, asks.layout())  # type: ignore[attr-defined, arg-type]
        PlanChain.of_loop(asks, asks.layout(), warn=False)  # type: ignore[attr-defined, arg-type]
    assert caplog.text.count("plugins.packing.slices=even, max_delay_steps=3 has no effect") == 1
    assert not chain.plan(sequences([60, 50, 3, 2])).cut
    with pytest.raises(EvenloadError, match="sequence 0 has 65 tokens, the cap is 64"):
        chain.plan(sequences([65, 3]))


def test_a_loop_that_runs_orders_gets_slices_and_is_told_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    asks = recipe(slices="even", max_delay_steps=3)
    with caplog.at_level("WARNING", logger="evenload"):
        chain = PlanChain.of_loop(asks, asks.layout(), whole=False)  # type: ignore[attr-defined, arg-type]
    assert caplog.text.count("plugins.packing.max_delay_steps=3 has no effect") == 1
    assert chain.plan(sequences([65, 3])).cut == {0}


def test_nothing_is_told_where_nothing_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    asks = recipe()
    with caplog.at_level("WARNING", logger="evenload"):
        PlanChain.of_loop(asks, asks.layout())  # type: ignore[attr-defined, arg-type]
    assert not caplog.text
