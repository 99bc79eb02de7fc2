"""Checkpoints: bit-equal on the same ranks, to rounding on others, and never a silent start from step 0."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_resume_is_bit_equal_and_goes_on_to_rounding_on_another_number_of_ranks(on_ranks, tmp_path, stage, dtype):
    arguments = {"stage": stage, "dtype": dtype, "folder": str(tmp_path)}
    went_on = on_ranks(2, "save_and_go_on", **arguments)
    assert on_ranks(2, "resume", **arguments) == went_on
    assert len(set(went_on[0])) == 2
    if dtype == "fp32":
        (alone,) = on_ranks(1, "resume", **arguments)
        for wanted, found in zip(went_on[0], alone, strict=True):
            assert float.fromhex(found) == pytest.approx(float.fromhex(wanted), rel=1e-6)
    if stage == 1:
        for told in on_ranks(2, "refused_loads", folder=str(tmp_path)):
            assert "written under another zero_stage" in told[0]
            assert "no complete DeepSpeed checkpoint" in told[1]
