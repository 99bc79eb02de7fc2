"""The pipeline planner: lawful plans for every layout, never slower than the others, memory, and what it refuses."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from evenload.core.costs.memory import activation_budget_bytes, peaks_of_stage
from evenload.core.errors import EvenloadError
from evenload.core.input.format import GIB
from evenload.core.laws import check
from evenload.core.machine.layout import Layout
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.passes import PassTimes
from evenload.core.simulate.step import simulate
from evenload.plugins.pipeline.baselines import BASELINES, flushed
from evenload.plugins.pipeline.config import PipelineConfig
from evenload.plugins.pipeline.settings import breaks
from hypothesis import given, settings
from hypothesis import strategies as st

from ..chains import chain_of

CAP = 256
LENGTHS = st.lists(st.integers(1, 4 * CAP), min_size=1, max_size=24)
SHORT = st.lists(st.integers(1, CAP), min_size=1, max_size=24)


def chain(pp=2, dp=1, cp=1, *, plugins=(), train=(), **pipeline):
    data = {
        "parallel": {"pp": pp, "dp": dp, "cp": cp},
        "train": {"global_batch_size": 4096, **dict(train)},
        "plugins": {"pipeline": {"enabled": True, "max_tokens": CAP, **pipeline}, **dict(plugins)},
    }
    return chain_of(data)


def step_s(plan, of):
    return simulate(plan, of.context, record=False).step_s


def held_bytes(plan):
    return max(peak for stage in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, stage))


def long_tail(count, longest, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 16), 1.2, count)
    return [int(n) for n in np.clip(drawn, 2, longest)]


@settings(max_examples=settings.default.max_examples // 2)
@given(LENGTHS, st.sampled_from([(2, 1, 1), (4, 1, 1), (2, 3, 1), (2, 1, 2)]), st.booleans(), st.booleans())
def test_plans_are_lawful_and_never_slower_than_the_baselines_that_fit(lengths, layout, packed, recompute):
    pp, dp, cp = layout
    before = {"packing": {"enabled": True, "max_tokens": CAP}} if packed else {}
    of = chain(pp, dp, cp, plugins=before, train={"recompute": recompute})
    batch = as_lengths(lengths)
    plan = of.plan(batch)  # has passed check()
    assert plan.limits.max_tokens <= CAP
    if cp > 1:
        return  # lanes are planned by compute alone
    names = ["whole_1f1b", "in_order", "fixed_chunks", "algorithm_1"]
    theirs = [of.baseline(name, batch) for name in names if not packed or name != "in_order"]
    room = activation_budget_bytes(of.context.cluster, of.context.costs.memory, plan.limits)
    fair = [one for one in theirs if one.limits.max_tokens <= CAP and held_bytes(one) <= room]
    if packed:
        links = [link for link in of.links if link[0].name == "packing"]
        fair.append(replace(of, links=tuple(links)).plan(batch))
    assert all(step_s(plan, of) <= step_s(one, of) * (1 + 1e-9) for one in fair)
    assert 0 < plan.bound_s <= outcome_of(plan, of.context).passes_s * (1 + 1e-9)


@settings(max_examples=settings.default.max_examples // 3)
@given(LENGTHS, st.sampled_from([(2, 1), (2, 2)]))
def test_plans_depend_on_the_batch_alone(lengths, layout):
    assert chain(*layout).plan(as_lengths(lengths)).digest == chain(*layout).plan(as_lengths(lengths)).digest


@settings(max_examples=settings.default.max_examples // 3)
@given(SHORT)
def test_hosts_of_whole_sequences_get_whole_sequences(lengths):
    of = chain()
    uncut = replace(of, limits=replace(of.limits, whole_sequences=True))
    for plan in (uncut.plan(as_lengths(lengths)), chain(chunks=1).plan(as_lengths(lengths))):
        assert not plan.cut
        assert sorted(s for m in plan.micro_batches for s in m.slices) == [(i, 0, n) for i, n in enumerate(lengths)]
    with pytest.raises(EvenloadError, match=f"has {2 * CAP} tokens, the cap is {CAP}"):
        uncut.plan(as_lengths([2 * CAP]))


def test_long_tails_leave_small_bubbles_and_gain_on_all_others():
    of = chain(4, max_tokens=4096)
    batch = as_lengths(long_tail(64, 16384))
    ours = simulate(of.plan(batch), of.context, record=False)
    others = {name: step_s(of.baseline(name, batch), of) for name in ("whole_1f1b", "in_order", "fixed_chunks")}
    assert ours.bubble_frac <= 0.05
    assert others["fixed_chunks"] >= 1.06 * ours.step_s
    assert min(others["whole_1f1b"], others["in_order"]) >= 1.3 * ours.step_s
    assert step_s(of.baseline("algorithm_1", batch), of) >= ours.step_s


def test_what_does_not_fit_is_recomputed_as_little_as_its_stage_needs():
    batch = as_lengths(long_tail(32, 4096))
    free = chain(max_tokens=1024).plan(batch)
    assert not any(map(any, free.recompute))
    cap = 0.4 * held_bytes(free)
    plan = chain(max_tokens=1024, activation_gib=cap / GIB).plan(batch)
    assert held_bytes(plan) <= cap * (1 + 1e-9)
    assert any(map(any, plan.recompute))
    whole = plan.revised(recompute=((plan.limits.layers_per_stage,) * len(plan.micro_batches),) * 2)
    assert sum(map(sum, plan.recompute)) < sum(map(sum, whole.recompute))
    with pytest.raises(EvenloadError, match="does not fit"):
        chain(max_tokens=1024, activation_gib=cap / GIB / 50).plan(batch)
    with pytest.raises(EvenloadError, match="recompute=auto"):
        chain(max_tokens=1024, activation_gib=cap / GIB / 50, recompute="off").plan(batch)


@pytest.mark.parametrize("word", ["off", "auto", "on"])
def test_weight_gradients_are_passes_of_their_own_only_where_they_may_be(word):
    batch = as_lengths(long_tail(32, 1024))
    plan = chain(4, split_backward=word).plan(batch)
    assert bool(any(plan.split)) == (word != "off")
    never = chain(4, split_backward=word)
    never = replace(never, limits=replace(never.limits, splits_backward=False))
    assert not any(never.plan(batch).split)


def test_one_stage_leaves_a_plan_as_it_is_and_says_so():
    packing = {"packing": {"enabled": True, "max_tokens": CAP}}
    of = chain(1, 2, plugins=packing)
    batch = as_lengths([300, 200, 100, 50])
    plan = of.plan(batch)
    alone = replace(of, links=of.links[:1]).plan(batch)
    assert plan.digest == alone.digest
    assert plan.notes[-1] == "pipeline: one stage, nothing to order"
    by_itself = chain(1, 2).plan(batch)  # makes micro-batches
    assert (by_itself.num_tokens, by_itself.notes) == (650, plan.notes[-1:])


def test_other_peoples_pipelines_refuse_trainers_in_step_too():
    recipe = parse(
        {
            "trainer": "deepspeed",
            "deepspeed": {"zero_stage": 3},
            "parallel": {"dp": 2},
            "plugins": {name: {"enabled": True, "max_tokens": CAP} for name in ("mesh", "pipeline")},
        }
    )
    of, batch = PlanChain.of_recipe(recipe, recipe.layout()), as_lengths([CAP] * 15)
    assert of.plan(batch).limits.max_tokens == CAP
    for name in ("whole_1f1b", "fixed_chunks", "algorithm_1"):
        with pytest.raises(EvenloadError, match="whose ranks run in lockstep"):
            of.baseline(name, batch)


@pytest.mark.parametrize(
    ("settings", "name", "broken"),
    [
        ({"chunks": 2}, "algorithm_1", "chunks is 2, a sequence is in 4"),
        ({"chunks": 4}, "algorithm_1", ""),
        ({"chunks": 2}, "fixed_chunks", ""),
        ({"chunks": 1}, "whole_1f1b", ""),
    ],
)
def test_baselines_that_do_not_keep_a_setting_are_said_to(settings, name, broken):
    of, batch = chain(2, max_tokens=4 * CAP, **settings), as_lengths([3 * CAP, 90, 80])
    found = of.rivals.breaks(name, of.baseline(name, batch))
    assert found == (f"plugins.pipeline.{broken}" if broken else "")
    plan = of.plan(batch)
    most = max(Counter(s.sequence for m in plan.micro_batches for s in m.slices).values())
    assert most <= settings["chunks"], "what does not keep a setting is no candidate"


def test_a_plan_that_does_not_keep_a_setting_is_told_by_what_it_does():
    of = chain(2, chunks=64, split_backward="on")
    plan = of.plan(as_lengths([4 * CAP, 300, 200, 90]))
    assert any(plan.split)
    again = plan.revised(recompute=((1,) * len(plan.micro_batches),) * 2)
    odd = plan.revised(limits=replace(plan.limits, max_tokens=1 << 20))
    words = (
        (plan, {"split_backward": "off"}, "split_backward is off, weight gradients run apart"),
        (again, {"recompute": "off"}, "recompute is off, layers are recomputed"),
        (plan, {"block_tokens": 64}, "block_tokens is 64, a slice starts at"),
        (odd, {"chunks": 3}, "chunks is 3, a sequence is in"),
    )
    for made, section, broken in words:
        assert breaks(made, PipelineConfig()) == ""
        assert broken in breaks(made, PipelineConfig.model_validate(section))


def test_trainers_in_step_are_left_to_packing():
    of = chain(1, 2)
    in_step = replace(of, limits=replace(of.limits, all_in_step=True))
    with pytest.raises(EvenloadError, match=r"plugins\.packing"):
        in_step.plan(as_lengths([5, 6]))


def test_a_cap_below_one_block_is_refused():
    packing = {"packing": {"enabled": True, "max_tokens": 2, "block_tokens": 1}}
    alone, behind = chain(max_tokens=2), chain(plugins=packing)
    batch = as_lengths([50, 5])
    for make in (alone.plan, behind.plan, lambda batch: alone.baseline("algorithm_1", batch)):
        with pytest.raises(EvenloadError, match=r"smaller than one block\n.*max_tokens 2 .*, block_tokens 4"):
            make(batch)


def test_chunks_of_equally_many_tokens_start_at_blocks_too():
    of = chain(max_tokens=90, block_tokens=16)
    plan = of.baseline("fixed_chunks", as_lengths([500, 89, 81, 7]))
    assert plan.cut
    assert all(s.start % 16 == 0 for m in plan.micro_batches for s in m.slices)


def packs(plan):
    return [[tuple(s) for s in m.slices] for m in plan.micro_batches]


def test_the_baselines_are_what_they_say():
    of = chain(max_tokens=8)
    batch = as_lengths([20, 3, 4, 6, 2])
    whole = of.baseline("whole_1f1b", batch)
    assert packs(whole) == [[(i, 0, n)] for i, n in enumerate(batch)]
    assert whole.limits.max_tokens == 20
    assert not whole.order
    assert packs(of.baseline("in_order", batch)) == [[(0, 0, 20)], [(1, 0, 3), (2, 0, 4), (3, 0, 6), (4, 0, 2)]]
    fixed = of.baseline("fixed_chunks", as_lengths([20, 3, 4, 6, 2]))
    size = max(m.num_tokens for m in fixed.micro_batches)
    assert size in (8, 4)
    assert [s.length for m in fixed.micro_batches for s in m.slices if s.sequence == 0] == {8: [8, 8, 4], 4: [4] * 5}[
        size
    ]


def test_algorithm_1_drains_a_pipeline_before_the_next_one_fills():
    of = chain(4, max_tokens=4096)
    bare = StepPlan(as_lengths([4000, 3000]), (), of.limits)
    config = of.links[0][1]
    draft = next(iter(BASELINES["algorithm_1"].drafts(bare, of.context, config)))
    count = len(draft.micro_batches)
    first = [i for i, m in enumerate(draft.micro_batches) if m.slices[0].sequence == 0]
    groups = [first, [i for i in range(count) if i not in first]]
    assert all(groups)
    plan = check(flushed(draft, groups, of.context))
    for ops in plan.order:
        places = [[place for place, op in enumerate(ops) if op.micro_batch in group] for group in groups]
        assert max(places[0]) < min(places[1])


def test_a_plan_that_came_in_keeps_its_micro_batches_where_ranks_share_them():
    of = chain(2, 2)
    batch = as_lengths([512, 200, 100])
    mesh = {"mesh": {"enabled": True, "max_tokens": CAP}}
    shared = chain(2, 2, plugins=mesh)
    came = replace(shared, links=tuple(link for link in shared.links if link[0].name == "mesh")).plan(batch)
    assert step_s(shared.plan(batch), of) <= step_s(came, of) * (1 + 1e-9)


def test_costs_without_memory_are_enough_to_plan():
    of = chain_of(
        {
            "parallel": {"pp": 2, "dp": 1},
            "costs": "flexsp-gpt-7b-a100",
            "plugins": {"pipeline": {"enabled": True, "max_tokens": CAP}},
        }
    )
    memory = of.context.costs.memory.model_copy(
        update={name: 0.0 for name in type(of.context.costs.memory).model_fields if name != "fit_error"}
    )
    costs = of.context.costs.model_copy(update={"memory": memory})
    of = replace(of, limits=replace(of.limits, memory=memory), context=replace(of.context, costs=costs))
    plan = of.plan(as_lengths([900, 300, 20, 10]))
    assert not any(map(any, plan.recompute))
    assert plan.cut == {0, 1}


def test_one_stage_recomputes_what_does_not_fit_in_the_plan_that_came_in():
    packing = {"packing": {"enabled": True, "max_tokens": CAP}}
    batch = as_lengths([300, 200, 100, 50, 700, 255])
    free = chain(1, 2, plugins=packing).plan(batch)
    cap = 0.7 * held_bytes(free)
    capped = chain(1, 2, plugins=packing, activation_gib=cap / GIB)
    plan = StepPlan(batch, (), capped.limits)
    for plugin, config in capped.links:
        plan = plugin.plan(plan, capped.context, config)
    check(plan)
    assert plan.micro_batches == free.micro_batches
    assert held_bytes(plan) <= cap
    assert any(plan.recompute[0])
    assert not all(plan.recompute[0])


def test_an_update_that_takes_more_than_the_cap_on_activations_lifts_no_cap():
    batch = as_lengths(long_tail(16, 1024))
    of = chain()
    memory = of.context.costs.memory.model_copy(update={"update_bytes": 2.0 * held_bytes(of.plan(batch))})
    costs = of.context.costs.model_copy(update={"memory": memory})
    cap = 0.6 * held_bytes(of.plan(batch))
    tight = chain(activation_gib=cap / GIB)
    plan = replace(tight, context=replace(tight.context, costs=costs)).plan(batch)
    assert held_bytes(plan) <= cap


@pytest.mark.parametrize("pp", [1, 2])
def test_a_plan_over_the_cap_of_pipelines_is_left_out_and_said_to_be(pp):
    of = chain(pp, 2)
    ((plugin, config),) = of.links
    plan = check(plugin.plan(of.stock(as_lengths([900, 700, 300, 20])), of.context, config))
    assert plan.limits.max_tokens == CAP
    assert any("over max_tokens and left out (stock)" in note for note in plan.notes)


@pytest.mark.parametrize("before", ["packing", "mesh"])
def test_sequences_that_stay_whole_here_may_be_cut_or_shared_by_the_plan_that_came_in(before):
    plugins = {before: {"enabled": True, "max_tokens": CAP}}
    plan = chain(2, 4, plugins=plugins, chunks=1).plan(as_lengths([3 * CAP, 100, 90]))
    assert plan.cut if before == "packing" else plan.shared
    assert any("pipeline: no chunks of its own: a sequence is longer" in note for note in plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["packing", "mesh"])
def test_what_a_recipe_recomputes_for_nothing_is_kept_in_plans_that_came_in_too(before):
    plugins = {before: {"enabled": True, "max_tokens": CAP}}
    pp = {"packing": 1, "mesh": 2}[before]
    batch = as_lengths([3 * CAP, 100, 90])
    kept, again = (chain(pp, 4, plugins=plugins, chunks=1, train={"recompute": word}) for word in (False, True))
    plan = again.plan(batch)
    assert step_s(plan, again) <= step_s(kept.plan(batch), kept) * 1.05
    assert 0 < plan.bound_s <= outcome_of(plan, again.context).passes_s * (1 + 1e-9)
    off = chain(pp, 4, plugins=plugins, chunks=1, train={"recompute": True}, recompute="off").plan(batch)
    assert not off.recompute


@pytest.mark.parametrize(("layout", "classes"), [(Layout(tp=2, pp=4, dp=4), 3), (Layout(tp=2, pp=4, dp=3), 4)])
def test_stages_whose_communication_is_taken_for_one_have_the_same(layout, classes):
    of = chain(4, layout.dp, max_tokens=1024)
    plan = of.plan(as_lengths(long_tail(24, 4096)))
    some = tuple(tuple((i + stage) % 3 == 0 for i in range(len(plan.micro_batches))) for stage in range(4))
    plan = plan.revised(recompute=tuple(tuple(map(int, row)) for row in some))
    times, each = (PassTimes(plan, replace(of.context, layout=layout)) for _ in range(2))
    assert len(set(times._alike)) == classes
    each._alike = list(range(4))
    for stage, ops in enumerate(plan.order):
        assert [times.seconds(stage, op) for op in ops] == [each.seconds(stage, op) for op in ops]
