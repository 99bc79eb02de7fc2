"""Checkpoints: bit-equal on the same ranks, to rounding on others, and never a silent start from step 0."""

from __future__ import annotations

import pytest
from harness.cases import only_full

pytestmark = pytest.mark.slow


def _near(found, wanted, rounding=1e-6):
    assert list(map(float.fromhex, found)) == pytest.approx(list(map(float.fromhex, wanted)), rel=rounding)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [only_full(0, "fp32"), (0, "bf16"), (1, "fp32"), only_full(2, "bf16"), (3, "fp32")],
)
def test_resume_is_bit_equal_and_goes_on_to_rounding_on_another_number_of_ranks(on_ranks, tmp_path, stage, dtype):
    arguments = {"stage": stage, "dtype": dtype, "folder": str(tmp_path)}
    went_on = on_ranks(2, "save_and_go_on", **arguments)
    assert on_ranks(2, "resume", **arguments) == went_on
    assert len(set(went_on[0])) == 2
    if dtype == "fp32":
        _near(on_ranks(1, "resume", **arguments)[0], went_on[0])
    if stage == 1:
        for (said,) in on_ranks(2, "resume", **{**arguments, "stage": 2}):
            assert "written under another zero_stage" in said
        for (said,) in on_ranks(2, "resume", **{**arguments, "folder": str(tmp_path / "missing")}):
            assert "no complete DeepSpeed checkpoint" in said


@pytest.mark.parametrize("stage", [only_full(0), only_full(1), only_full(2), 3])
def test_divided_experts_resume_bit_equal_and_go_on_on_other_ranks(on_ranks, tmp_path, stage):
    arguments = {"stage": stage, "ep": 2, "family": "mixtral", "folder": str(tmp_path)}
    went_on = on_ranks(2, "save_and_go_on", **arguments)
    assert on_ranks(2, "resume", **arguments) == went_on
    # From ZeRO 1 on a process of its own converts the checkpoint, which takes seconds.
    for ep in {0: (2, 4), 2: (2,)}.get(stage, (4,)):
        more = on_ranks(4, "resume", **{**arguments, "ep": ep})
        if stage == 0 and ep == 4:
            assert all("another ep\n  found: 2 there, 4 in this recipe" in said for (said,) in more)
        else:
            _near(more[0], went_on[0])


@pytest.mark.parametrize(("stage", "dtype"), [only_full(0, "fp32"), (1, "bf16")])
def test_a_pipeline_resumes_bit_equal(on_ranks, tmp_path, stage, dtype):
    arguments = {"pp": 2, "stage": stage, "dtype": dtype, "folder": str(tmp_path)}
    went_on = on_ranks(2, "save_and_go_on", **arguments)
    assert went_on == on_ranks(2, "resume", **arguments)
    assert len(set(went_on[0])) == 2
    assert len(set(map(tuple, went_on))) == 1


def test_more_ranks_of_a_pipeline_go_on_and_other_stages_are_refused(on_ranks, tmp_path):
    arguments = {"pp": 2, "stage": 1, "folder": str(tmp_path)}
    went_on = on_ranks(4, "save_and_go_on", **arguments)
    for (said,) in on_ranks(4, "resume", **{**arguments, "pp": 4}):
        assert "written under another pp" in said
    for (said,) in on_ranks(2, "resume", **{**arguments, "layers": [1, 3]}):
        assert "another number of layers of each stage" in said
    for resumed in on_ranks(2, "resume", **arguments):
        _near(resumed, went_on[0])


def test_a_v_resumes_on_other_ranks_and_is_not_taken_for_a_pipeline_without(on_ranks, tmp_path):
    arguments = {"pp": 2, "stage": 1, "dtype": "bf16", "folder": str(tmp_path)}
    went_on = on_ranks(2, "save_and_go_on", v_shape=True, **arguments)
    assert went_on == on_ranks(2, "resume", v_shape=True, **arguments)
    for (said,) in on_ranks(2, "resume", **arguments):
        assert "another number of pipeline stages on each device" in said
    for resumed in on_ranks(4, "resume", v_shape=True, **arguments):
        _near(resumed, went_on[0], 1e-2)
