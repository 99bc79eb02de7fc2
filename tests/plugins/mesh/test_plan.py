"""The mesh planner: laws by hypothesis, degrees by time, balance, what its settings do."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import tokens_of_ranks
from evenload.core.planning.judge import rivals_of
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.baselines import BASELINES
from evenload.plugins.mesh.config import ENGINES as ENGINE_NAMES
from evenload.plugins.mesh.config import MeshConfig
from evenload.plugins.mesh.plan import plan
from evenload.plugins.mesh.settings import breaks
from harness.cases import pairs
from hypothesis import example, given
from hypothesis import strategies as st

from ..chains import chain_of, heavy_tail


@cache
def chain(num_ranks, pp=1, zero_stage=None, cluster="h100", heads=8):
    found = chain_of(
        {
            "trainer": "megatron" if zero_stage is None else "deepspeed",
            "model": {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": heads},
            "parallel": {"dp": num_ranks, "pp": pp},
            "deepspeed": {"zero_stage": zero_stage or 0},
            "train": {"global_batch_size": 4096},
            "cluster": cluster,
        }
    )
    # What no plan changes is left out.
    traffic = replace(found.context.traffic, gradient_bytes=0.0, weight_bytes=0.0)
    return replace(found, context=replace(found.context, traffic=traffic))


def planned(made, lengths, **config):
    bare = StepPlan(as_lengths(lengths), (), made.limits)
    return plan(bare, made.context, MeshConfig.model_validate(config))


def seconds(made, step):
    return simulate(step, made.context, record=False).step_s


def degree_of(step, sequence):
    """Ranks of a sequence that is in one slice."""
    for m in step.micro_batches:
        for number, s in enumerate(m.slices):
            if s.sequence == sequence:
                return len(m.cp_groups[number] if m.cp_groups else m.ranks)
    raise AssertionError(sequence)


LENGTHS = st.lists(st.one_of(st.integers(1, 400), st.integers(1, 20_000)), min_size=1, max_size=40)
LAYOUTS = st.tuples(
    st.sampled_from([2, 3, 4, 6, 8, 12, 16]), st.sampled_from([(1, None), (2, None), (4, None), (1, 1), (1, 3)])
)
ENGINES = st.sampled_from([("ring", "all_gather", "all_to_all", "hybrid"), ("ring",), ("hybrid", "ring")])


@given(LENGTHS, LAYOUTS, ENGINES, st.sampled_from([4096, 8192, 1 << 20]), st.sampled_from(["local", "h100"]))
@example([12, 2398, 6079], (2, (1, None)), ENGINE_NAMES, 8192, "local")  # cp_all is faster here, and does not fit
@example([1, 1, 1, 1, 8473], (2, (1, None)), ENGINE_NAMES, 8192, "local")
def test_plans_are_lawful_bounded_and_no_slower_than_the_baselines(lengths, layout, engines, cap, cluster):
    ranks, (pp, zero) = layout
    made = chain(ranks, pp, zero, cluster)
    bare = StepPlan(as_lengths(lengths), (), made.limits)
    config = MeshConfig.model_validate({"engines": engines, "max_tokens": cap})
    if max(lengths) > cap * ranks:
        return
    found = plan(bare, made.context, config)
    assert found.made_by.endswith("mesh")
    assert found.limits.max_tokens == cap
    assert all(m.cp_comm in engines for m in found.micro_batches if len(m.ranks) > 1)
    assert found.digest == plan(bare, made.context, config).digest, "the same on every rank"
    taken = seconds(made, found)
    assert taken >= found.bound_s * (1 - 1e-6)
    for name, baseline in BASELINES.items():
        other = check(baseline.plan(bare, made.context, config))
        if f"mesh.{name}" in rivals_of(found):
            assert taken <= seconds(made, other) * (1 + 1e-9), name


@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_one_long_sequence_no_longer_bounds_the_step(seed, zero):
    made = chain(8, 1, zero)
    lengths = [60_000, *heavy_tail(seed, 255, 16_000)]
    found = planned(made, lengths, max_tokens=16384)
    alone = float(made.context.costs.sequence_s(np.array([60_000.0]))[0])
    assert seconds(made, found) < 0.5 * alone
    assert seconds(made, found) <= 1.1 * found.bound_s
    assert degree_of(found, 0) > 4


def test_ranks_beyond_a_node_are_taken_only_where_they_pay():
    near, far = chain(32, 1, None, "h100"), chain(32, 1, None, "flexsp-a100")
    lengths = [30_000, *heavy_tail(3, 255, 4000)]
    assert degree_of(planned(far, lengths, max_tokens=1 << 20), 0) <= 8
    longer = [600_000, *heavy_tail(3, 255, 4000)]
    assert degree_of(planned(near, longer, max_tokens=1 << 20), 0) > 8


@pytest.mark.parametrize(("pp", "zero"), [(1, None), (4, None), (1, 3)])
def test_one_rank_keeps_the_cap_of_many(pp, zero):
    """What several ranks share or cut, one that is left cuts: a resumed run is under the same cap."""
    for ranks in (2, 1):
        found = check(planned(chain(ranks, pp, zero), [1024, 512, 256, 64], max_tokens=256))
        assert found.limits.max_tokens == 256
        assert max(max(tokens_of_ranks(m).values()) for m in found.micro_batches) <= 256
        assert ranks > 1 or found.cut == {0, 1}


def test_a_plan_of_one_rank_stays_as_it_came():
    made = chain(1)
    found = planned(made, [5, 900, 40], max_tokens=1024)
    assert sorted(s for m in found.micro_batches for s in m.slices) == [(0, 0, 5), (1, 0, 900), (2, 0, 40)]
    assert plan(found, made.context, MeshConfig()) is found


def test_a_plan_over_the_cap_does_not_come_in():
    for ranks in (1, 4):
        made = chain(ranks)
        came = planned(made, [900, 300, 200], max_tokens=1024, max_degree=1)
        found = check(plan(came, made.context, MeshConfig(max_tokens=500)))
        assert found.limits.max_tokens == 500
        assert "packing" not in found.made_by


def test_hosts_of_whole_sequences_keep_the_cap_that_was_asked_for():
    made = chain(2)
    made = replace(made, limits=replace(made.limits, whole_sequences=True))
    assert planned(made, [500, 300], max_tokens=500).limits.max_tokens == 500
    with pytest.raises(EvenloadError, match=r"501 tokens, the cap is 500\n.*plugins\.mesh\.max_tokens"):
        planned(made, [501, 300], max_tokens=500)
    # Nobody asked for what the device is predicted to hold; that it is exceeded is said.
    found = planned(made, [400_000, 300])
    assert any("400000 tokens run at once" in note for note in found.notes)


@pairs(
    ("engines", [[name] for name in ENGINE_NAMES] + [["hybrid", "all_to_all"]]),
    ("heads", [1, 8]),
    ("ranks, pp, zero", [(3, 2, None), (2, 1, None), (3, 1, 3), (1, 4, None)]),
)
def test_any_engines_plan(engines, heads, ranks, pp, zero):
    """Also where no cp_comm shares a sequence among so many ranks, and where chains are tried."""
    for cap in (256, 1 << 20):
        lengths = [1000 + 13 * k for k in range(9)]
        found = check(planned(chain(ranks, pp, zero, heads=heads), lengths, max_tokens=cap, engines=engines))
        assert breaks(found, MeshConfig.model_validate({"engines": engines})) == ""


@pytest.mark.parametrize("zero", [None, 3])
def test_one_rank_a_sequence_in_several_rounds(zero):
    lengths = [1000 + 13 * k for k in range(20)]
    found = check(planned(chain(2, 1, zero), lengths, max_tokens=4096, max_degree=1))
    assert not found.shared


def test_costs_without_launches_have_a_bound():
    """One long sequence alone, and nothing that takes time without it: the search for the bound begins at nothing."""
    made = chain(11)
    costs = made.context.costs
    free = {name: getattr(costs, name).model_copy(update={"launch_s": 0.0}) for name in ("forward", "backward")}
    made = replace(made, context=replace(made.context, costs=costs.model_copy(update=free)))
    found = planned(made, [77], max_tokens=11, remap="off", powers_of_two=True)
    assert 0 < found.bound_s <= seconds(made, found) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("settings", "broken"),
    [
        ({}, ""),
        ({"max_degree": 3}, ""),
        ({"max_degree": 2}, "max_degree is 2, 3 ranks share a sequence"),
        ({"powers_of_two": True}, "powers_of_two is true, 3 ranks share a sequence"),
        ({"engines": ["all_to_all", "ring"]}, ""),
        ({"engines": "all_to_all"}, "engines are all_to_all, sequences are shared by ring"),
        ({"remap": "off"}, "remap is off, tokens are moved"),
        ({"routed": "off"}, "routed is off, traffic is routed"),
        ({"offload": "off"}, "offload is off, activations wait in host memory"),
    ],
)
def test_a_plan_that_does_not_keep_a_setting_is_told_by_what_it_does(settings, broken):
    one = MicroBatch((Slice(0, 0, 90),), (0, 1, 2), cp_comm="ring", remap=True, routed=True)
    made = StepPlan(as_lengths([90]), (one,), chain(3).limits, offload=(0.5,))
    assert breaks(made, MeshConfig.model_validate(settings)) == (f"plugins.mesh.{broken}" if broken else "")


def test_baselines_that_ignore_settings_are_said_to_and_never_taken():
    made, lengths = chain(4), [6000, 5000, 400, 300]
    bare, config = StepPlan(as_lengths(lengths), (), made.limits), MeshConfig(max_tokens=1 << 20, max_degree=2)
    assert "4 ranks share" in breaks(BASELINES["cp_all"].plan(bare, made.context, config), config)
    assert breaks(BASELINES["cp_1"].plan(bare, made.context, config), config) == ""
    assert breaks(plan(bare, made.context, config), config) == ""


def test_what_no_rank_holds_runs_in_slices_on_one_rank_in_cp_1():
    for ranks, pp, zero in ((3, 1, None), (2, 2, None), (3, 1, 3), (1, 1, None)):
        made = chain(ranks, pp, zero)
        bare = StepPlan(as_lengths([3000, 500, 20]), (), made.limits)
        found = check(BASELINES["cp_1"].plan(bare, made.context, MeshConfig(max_tokens=600)))
        assert found.limits.max_tokens == 600
        assert found.cut == {0}
        assert not found.shared


def test_settings_bound_the_degrees():
    lengths = [200_000, *heavy_tail(1, 200, 8000)]
    made = chain(16)
    few = planned(made, lengths, max_tokens=1 << 20, max_degree=3)
    assert 1 < max(len(cp_group) for m in few.micro_batches for cp_group in m.ranks_of_slices if m.slices) <= 3
    powers = planned(made, lengths, max_tokens=1 << 20, powers_of_two=True)
    assert {degree_of(powers, i) for i in range(len(lengths))} <= {1, 2, 4, 8, 16}


def test_off_is_a_word_and_one_engine_a_list():
    config = MeshConfig.model_validate({"remap": False, "routed": False, "offload": False, "engines": "ring"})
    assert (config.remap, config.routed, config.offload, config.engines) == ("off", "off", "off", ("ring",))


def test_the_given_plan_stays_where_nothing_is_faster():
    made = chain(2)
    batch = as_lengths([1000, 1000])
    given = StepPlan(
        batch, tuple(MicroBatch((Slice(i, 0, 1000),), (i,)) for i in range(2)), made.limits, made_by="packing"
    )
    found = plan(given, made.context, MeshConfig(max_tokens=2000))
    assert found.micro_batches == given.micro_batches
    assert found.made_by == "packing, mesh"


def test_tokens_move_where_ranks_of_a_long_sequence_would_leave_no_room():
    made, lengths = chain(8, 1, 3), [5000, 700, 700, 700, 700, 195]
    moved, whole = (planned(made, lengths, max_tokens=1000, remap=word) for word in ("auto", False))
    assert [m.remap for m in moved.micro_batches] == [True], "one round holds 7,995 of 8,000 tokens"
    assert not any(m.remap for m in whole.micro_batches)
    assert seconds(made, moved) < 0.8 * seconds(made, whole)


def test_activations_wait_in_host_memory_where_the_device_would_not_hold_them():
    made = chain(2)
    here, there = (planned(made, [150_000], max_tokens=1 << 20, offload=word) for word in (False, "auto"))
    room = made.context.cluster.memory_bytes
    assert not here.offload
    assert all(0 < share < 1 for share in there.offload)
    assert simulate(here, made.context, record=False).peak_bytes.max() > room
    assert simulate(there, made.context, record=False).peak_bytes.max() < room
    assert seconds(made, there) == pytest.approx(seconds(made, here)), "what hides costs nothing"


def test_rounds_of_many_short_sequences_are_level():
    made = chain(16)
    found = planned(made, [40_000, *heavy_tail(7, 511, 8000)], max_tokens=8192)
    busy = simulate(found, made.context, record=False)
    ranks = (busy.busy_s + busy.exposed_s).sum(axis=0)
    assert ranks.max() <= 1.12 * ranks.mean()


def test_the_cap_of_tokens_follows_from_the_memory_of_the_device():
    made = chain(4)
    found = planned(made, [150_000, 1000])
    assert 150_000 / 4 <= found.limits.max_tokens < 150_000
    assert degree_of(found, 0) > 1
    assert simulate(found, made.context, record=False).peak_bytes.max() <= made.context.cluster.memory_bytes


def test_a_section_of_before_is_read_without_halves_in_turns():
    assert MeshConfig.model_validate({"halves": "off"}) == MeshConfig.model_validate({"halves": False}) == MeshConfig()
    with pytest.raises(EvenloadError, match=r"plugins\.mesh has no key 'halves'"):
        parse({"plugins": {"mesh": {"halves": "auto"}}})
