"""Checkpoints: bit-equal on the same ranks, to rounding on others, and never a silent start from step 0."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_resume_is_bit_equal(on_ranks, tmp_path, stage, dtype):
    went_on = on_ranks(2, "save_and_go_on", stage=stage, dtype=dtype, folder=str(tmp_path))
    resumed = on_ranks(2, "resume", stage=stage, dtype=dtype, folder=str(tmp_path))
    assert went_on == resumed
    assert len(set(went_on[0])) == 3


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_another_number_of_ranks_goes_on_to_rounding(on_ranks, tmp_path, stage):
    went_on = on_ranks(2, "save_and_go_on", stage=stage, dtype="fp32", folder=str(tmp_path))
    resumed = on_ranks(1, "resume", stage=stage, dtype="fp32", folder=str(tmp_path))
    for wanted, found in zip(went_on[0], resumed[0], strict=True):
        assert float.fromhex(found) == pytest.approx(float.fromhex(wanted), rel=1e-6)


def test_nothing_to_load_and_another_stage_are_errors(on_ranks, tmp_path):
    on_ranks(2, "save_and_go_on", stage=1, dtype="fp32", folder=str(tmp_path))
    for told in on_ranks(2, "refused_loads", folder=str(tmp_path)):
        assert "written under another zero_stage" in told[0]
        assert "no complete DeepSpeed checkpoint" in told[1]
