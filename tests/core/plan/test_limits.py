"""Bytes of a device by hand: of a stage, of ranks that act as one, and limits under further caps."""

from __future__ import annotations

import pytest
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import AMOUNTS, Limits, MemoryCost

MODEL = MemoryCost(**{name: 960.0 * place for place, name in enumerate(AMOUNTS, 1)})
OF_ONE_LAYER = {
    "pass_bytes",
    "head_bytes_per_token",
    "head_working_bytes_per_token",
    "working_bytes_per_token",
    "input_bytes_per_token",
}
OF_ALL_STAGES_OF_A_DEVICE = {"fixed_bytes", "sharded_bytes", "gathered_bytes", "update_bytes"}


@pytest.mark.parametrize("v_shape", [False, True])
def test_a_stage_has_its_part_of_the_layers_and_head_and_single_layers_whole(v_shape: bool) -> None:
    """Four devices, of one stage or two; tensor-parallel ranks divide all but what they are said to have more of."""
    layout = Layout(tp=2, pp=4, cp=1, ep=1, dp=1, v_shape=v_shape)
    stage = MODEL.of_stage(layout, {"kv_bytes_per_token": 0.75})
    stages = 8 if v_shape else 4
    for place, name in enumerate(AMOUNTS, 1):
        parts = 1 if name in OF_ONE_LAYER else 4 if name in OF_ALL_STAGES_OF_A_DEVICE else stages
        share = 0.75 if name == "kv_bytes_per_token" else 0.5
        assert getattr(stage, name) == pytest.approx(960.0 * place * share / parts), name
    assert MODEL.of_stage(Layout(2, 1, 1, 1, 1)).of_model(2) == MODEL


@pytest.mark.parametrize(("dp", "whole_bytes"), [(1, 24.0), (2, 0.0)])
def test_ranks_that_act_as_one_divide_tokens_and_what_is_sharded_and_alone_gather_weights(
    dp: int, whole_bytes: float
) -> None:
    memory = MemoryCost(
        fixed_bytes=100, sharded_bytes=40, gathered_bytes=24, activation_bytes_per_token=8, update_bytes=6
    )
    one = memory.folded(Layout(tp=1, pp=1, cp=2, ep=1, dp=dp))
    assert (one.fixed_bytes, one.sharded_bytes) == (100 - 40 + 20 + whole_bytes, 20)
    assert (one.activation_bytes_per_token, one.update_bytes) == (4, 6)


def test_further_caps_only_lower() -> None:
    limits = Limits(2, 100, max_activation_bytes=5 * 2.0**30)
    assert [limits.under(tokens).max_tokens for tokens in (None, 50, 500)] == [100, 50, 100]
    assert [limits.under(None, gib).max_activation_bytes / 2**30 for gib in (None, 2.0, 9.0)] == [5, 2, 5]
    assert limits.held_to(Limits(2, 70)).max_tokens == limits.held_to(Limits(2, 70, round_tokens=4)).max_tokens == 70
    assert limits.held_to(Limits(2, 700, round_tokens=4)) == Limits(
        2, 100, max_activation_bytes=5 * 2.0**30, round_tokens=4
    )
