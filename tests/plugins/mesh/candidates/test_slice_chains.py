"""Sequences that all ranks together cannot hold at once, and pipelines: chains of slices on several ranks."""

from dataclasses import replace

import numpy as np
import pytest
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.plan.token_layout import tokens_of_ranks
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.candidates.slice_chains import chained
from evenload.plugins.mesh.config import MeshConfig
from evenload.plugins.mesh.cost_table import LEAST_TOKENS, cost_table_of
from evenload.plugins.mesh.emit.blocks import fitted, in_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from ...chains import chain_of


def chain(cap, dp=4, pp=1, **more):
    mesh = {"enabled": True, "max_tokens": cap}
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    return chain_of({"model": model, "parallel": {"dp": dp, "pp": pp}, "plugins": {"mesh": mesh}, **more})


def test_what_all_ranks_cannot_hold_at_once_runs_in_slices_on_several():
    made = chain(512).plan(as_lengths([5000, 300, 200, 40]))
    mine = [m for m in made.micro_batches if any(s.sequence == 0 for s in m.slices)]
    assert len(mine) >= 3
    assert {len(m.ranks) for m in mine} <= {2, 4}
    assert 0 in made.cut
    assert made.bound_s <= simulate(made, chain(512).context).step_s


def test_a_sequence_too_short_for_so_many_ranks_takes_fewer():
    made = chain(64, dp=8).plan(as_lengths([2000, 500]))
    assert 0 in made.cut
    assert all(LEAST_TOKENS * len(m.ranks) <= s.length for m in made.micro_batches for s in m.slices)


def test_a_pipeline_waits_less_with_slices():
    planner = chain(1 << 20, dp=2, pp=4)
    batch = as_lengths([60000, 9000, 800, 700])
    sliced = simulate(planner.plan(batch), planner.context).step_s
    shared = simulate(planner.baseline("cp_all", batch), planner.context).step_s
    assert sliced < 0.75 * shared


def test_in_a_pipeline_only_what_is_more_than_a_ranks_share_is_shared():
    planner, lengths = chain(1024, dp=4, pp=4), np.array([30_000, *[4000] * 6, *[500] * 20], dtype=np.int64)
    limits = replace(planner.limits, max_tokens=1024)
    cost_table = cost_table_of(planner.context, limits, MeshConfig(), 30_000)
    seconds = planner.context.costs.sequence_s(lengths)
    wide = set(np.flatnonzero(seconds > seconds.sum() / 4).tolist())
    found = list(chained(lengths, cost_table, limits))
    shared = [
        {s.sequence for b in blocks for r in b.rounds for m in r if len(m.ranks) > 1 for s in m.slices}
        for blocks in found
    ]
    assert wide == {0}
    assert wide in shared


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.integers(2, 6000), min_size=2, max_size=12),
    st.sampled_from([300, 700, 5000]),
    st.sampled_from([(4, 1), (3, 1), (2, 2), (3, 2)]),
    st.booleans(),
)
def test_every_way_of_cutting_is_lawful(lengths, cap, plane, equal):
    planner = chain(cap, *plane)
    limits = replace(planner.limits, max_tokens=cap, all_in_step=equal and plane[1] == 1)
    values = np.array(lengths, dtype=np.int64)
    cost_table = cost_table_of(planner.context, limits, MeshConfig(), int(values.max()))
    bare = StepPlan(as_lengths(lengths), (), limits)
    found = [check(in_blocks(bare, limits, blocks, "chains")) for blocks in chained(values, cost_table, limits)]
    assert found
    for made in found:
        counts = {len(made.of_rank(rank)) for rank in range(plane[0])}
        assert len(counts) == 1


def test_early_slices_are_replayed_where_a_chain_would_not_fit():
    planner = chain(512)
    limits = replace(planner.limits, max_tokens=512)
    lengths = np.array([8000, 60], dtype=np.int64)
    cost_table = cost_table_of(planner.context, limits, MeshConfig(), 8000)
    made = in_blocks(
        StepPlan(as_lengths(lengths), (), limits), limits, next(chained(lengths, cost_table, limits)), "chains"
    )
    whole = max(peak for peak, _ in peaks_of_stage(made, 0))
    less = check(fitted(made, 0.6 * whole))
    assert less.replayed
    assert max(peak for peak, _ in peaks_of_stage(less, 0)) <= 0.6 * whole
    assert fitted(made, whole) is not less
    assert not fitted(made, whole).replayed


@given(st.integers(1, 20_000), st.integers(4, 600), st.sampled_from([1, 2, 3, 4]))
def test_slices_keep_the_cap_however_many_they_are(length, cap, degree):
    """Equal in cost where that keeps the cap, else at the cap; and no rank has less than it needs."""
    limits = replace(chain(cap).limits, max_tokens=cap)
    cost_table = cost_table_of(chain(cap).context, limits, MeshConfig(max_degree=degree), length)
    for blocks in chained(np.array([length]), cost_table, limits):
        mine = [m for block in blocks for one in block.rounds for m in one if m.slices]
        assert sum(m.num_tokens for m in mine) == length
        for m in mine:
            assert max(tokens_of_ranks(m).values()) <= cap
            assert len(m.ranks) == 1 or m.num_tokens >= LEAST_TOKENS * len(m.ranks)


def test_degrees_that_no_engine_can_share_are_not_tried():
    planner = chain(1 << 20, dp=6, pp=2)
    for engines, usable in ((("hybrid",), [1, 4, 6]), (("all_to_all",), [1, 2, 3, 4]), (("ring",), [1, 2, 3, 4, 5, 6])):
        cost_table = cost_table_of(planner.context, planner.limits, MeshConfig(engines=engines), 4000)
        assert cost_table.usable == usable
        degrees = {
            len(m.ranks)
            for blocks in chained(np.array([4000, 100]), cost_table, replace(planner.limits, max_tokens=4000))
            for block in blocks
            for one in block.rounds
            for m in one
        }
        assert degrees <= set(usable)


def test_what_no_cut_can_hold_is_refused():
    with pytest.raises(EvenloadError, match="longer than all ranks"):
        chain(2).plan(as_lengths([4000, 10]))


def test_packing_that_may_not_cut_leaves_long_sequences_to_mesh():
    packing = {"enabled": True, "max_tokens": 512, "slices": "off"}
    made = chain_of({"parallel": {"dp": 4}, "plugins": {"packing": packing, "mesh": {"enabled": True}}}).plan(
        as_lengths([1500, 300, 200, 90])
    )
    assert made.limits.max_tokens == 512
    assert made.made_by == "mesh"
    assert made.shared


def test_static_context_parallelism_beside_mesh_is_refused():
    recipe = {"parallel": {"dp": 2, "cp": 2}, "plugins": {"mesh": {"enabled": True}}}
    with pytest.raises(EvenloadError, match=r"parallel\.cp and plugins\.mesh both say"):
        parse(recipe)
