"""Pictures that travel with their row under the real Trainer: loss and gradients of a stock Trainer."""

from __future__ import annotations

import pytest
from harness.cases import only_full
from variant_checks import check_exact, check_planned

pytestmark = pytest.mark.slow

ROUNDING = 1e-9
MODELS = ["qwen2_5_vl", "llava", "llava with windows", "llava in rows", "smolvlm"]


def test_rows_change_ranks_with_their_pictures_exactly(on_ranks):
    """Patches by grid, a picture an entry, pictures of a row; in packs, and in padded groups as if none were exact."""
    of_ranks = on_ranks(2, "rank_pictures.each", names=MODELS)
    check_exact(of_ranks, ROUNDING, idle=[])
    for found in of_ranks:
        for name, one in found.items():
            assert one["padded"] == ("in rows" in name), (name, one)
            assert all(any(back for _, back in beside) for beside in one["beside"]), (name, one)


@pytest.mark.parametrize("planes", [3, only_full(4)])
def test_text_whose_positions_come_in_planes_is_planned(on_ranks, planes):
    of_ranks = on_ranks(2, "rank_pictures.text_in_planes", name="qwen2_5_vl", planes=planes)
    check_exact([{"planes": found} for found in of_ranks], ROUNDING, idle=[])


def test_a_tower_that_looks_across_pictures_leaves_the_script_as_it_is(on_ranks):
    for found in on_ranks(2, "rank_pictures.exact", name="llava across pictures"):
        assert found["grad"] == 0, found
        (line,) = found["idle"]
        assert "off by" in line, found


@pytest.mark.parametrize("zero", [only_full(2), 3])
def test_the_same_under_zero(on_ranks, zero):
    """In float32, as near as stock is to itself in float64; every rank runs the tower in every pass."""
    for found in on_ranks(2, "rank_pictures.under_zero", name="qwen2_5_vl", zero=zero):
        assert found["rounding"] < 1e-4, found
        check_exact([{"qwen2_5_vl": found}], max(2e-6, 2 * found["rounding"]), idle=[])


def test_a_rank_whose_batches_have_no_pictures_computes_those_of_others(on_ranks):
    of_ranks = on_ranks(2, "rank_pictures.one_sided", name="qwen2_5_vl")
    check_exact([{"one side": found} for found in of_ranks], ROUNDING, idle=[], ranks={0, 1})


@pytest.mark.parametrize("fault", ["token", "picture"])
def test_pictures_and_tokens_that_disagree_end_as_they_do_by_themselves(on_ranks, fault):
    (ends,) = on_ranks(1, "rank_pictures.disagreeing", name="qwen2_5_vl", fault=fault)
    assert ends["stock"] == ends["planned"] != "trained"
    assert "pictures of a batch and the tokens that stand for them disagree" in ends["said"], ends
    assert "image_grid_thw does not fit rows with" in ends["said"]


def test_a_loop_of_accelerate_trains_as_without_evenload(on_ranks):
    of_ranks = on_ranks(2, "rank_pictures.loop")
    check_planned([{"loop": ended | {"wanted": ["packs"] * 3}} for ended in of_ranks], ROUNDING)
