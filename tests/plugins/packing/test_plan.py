"""The packing planner and its baselines: laws by hypothesis, quality against bounds."""

from dataclasses import replace
from functools import partial

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.judge import outcome_of
from evenload.core.simulate.predict import predict
from evenload.plugins.packing.config import PackingConfig
from evenload.plugins.packing.settings import breaks
from hypothesis import given
from hypothesis import strategies as st

from ..chains import heavy_tail, packing_chain

CAP = 256


chain = partial(packing_chain, max_tokens=CAP, micro_batch_size=2)

LENGTHS = st.lists(st.integers(1, CAP), min_size=1, max_size=60)
LAYOUTS = st.tuples(st.integers(1, 6), st.sampled_from([(1, None), (2, None), (4, None), (1, 1), (1, 3)]))


@given(LENGTHS, LAYOUTS)
def test_every_planner_makes_lawful_plans(lengths, layout):
    ranks, (pp, zero) = layout
    made = chain(ranks, pp=pp, zero=zero)
    batch = as_lengths(lengths)
    whole = chain(ranks, pp=pp, zero=zero, slices="off")
    plans = [whole.plan(batch), *(made.baseline(name, batch) for name in made.rivals.names)]
    for plan in (*plans, made.plan(batch)):  # each has passed check()
        assert all(plan.of_rank(rank) for rank in range(ranks)), "every rank has at least a dummy"
        if zero == 3:
            assert len({len(plan.of_rank(rank)) for rank in range(ranks)}) == 1
    for plan in plans:
        assert sorted(s for m in plan.micro_batches for s in m.slices) == [(i, 0, n) for i, n in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 6))
def test_the_bound_holds_for_every_planner_and_none_is_faster(lengths, ranks):
    made = chain(ranks)
    batch = as_lengths(lengths)
    plan = made.plan(batch)
    ours = predict(plan, made.context.costs)
    # The stock plan is left out: its micro-batches are capped in samples, so it may launch fewer.
    capped = [made.baseline(name, batch) for name in made.rivals.names if name != "padded"]
    others = [predict(one, made.context.costs) for one in capped]
    assert all(p.step_s >= plan.bound_s * (1 - 1e-9) for p in (ours, *others))
    least_s = min(outcome_of(one, made.context).step_s for one in capped)
    assert outcome_of(plan, made.context).step_s <= least_s * (1 + 1e-9)


@given(LENGTHS, st.integers(1, 6), st.randoms())
def test_plans_depend_on_lengths_alone(lengths, ranks, random):
    made = chain(ranks)
    assert made.plan(as_lengths(lengths)).digest == made.plan(as_lengths(lengths)).digest
    mixed = sorted(lengths, key=lambda _: random.random())
    one = predict(made.plan(as_lengths(lengths)), made.context.costs)
    other = predict(made.plan(as_lengths(mixed)), made.context.costs)
    assert one.step_s == pytest.approx(other.step_s, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "ranks"), [(512, 16), (512, 32), (4096, 64)])
def test_within_one_percent_of_the_bound_when_no_sequence_exceeds_the_mean(seed, count, ranks):
    made = chain(ranks, max_tokens=16384)
    lengths = heavy_tail(seed, count, 8192)
    seconds = made.context.costs.sequence_s(lengths)
    plan = made.plan(as_lengths(lengths))
    step_s = predict(plan, made.context.costs).step_s
    if seconds.max() <= seconds.mean() * count / ranks:
        assert step_s <= 1.01 * plan.bound_s
    else:
        assert step_s == pytest.approx(seconds.max() + made.context.costs.launch_s, rel=0.01)


def test_the_baselines_are_what_they_say():
    made = chain(2, max_tokens=10)
    batch = as_lengths([6, 5, 4, 3, 2, 8])

    def packs(plan):
        return [[s.sequence for s in m.slices] for m in plan.micro_batches]

    assert packs(made.baseline("in_order", batch)) == [[0], [1, 2], [3, 4], [5]]
    # 8+2, 6+4 and 5+3; the first is halved so that both ranks have as many.
    assert packs(made.baseline("best_fit", batch)) == [[5], [4], [0, 2], [1, 3]]
    stock = made.baseline("stock", batch)
    assert packs(stock) == [[0, 1], [2, 3], [4, 5]]
    assert [m.pad_to for m in stock.micro_batches] == [6, 4, 8]
    assert made.baseline("padded", batch).digest == stock.digest


def test_a_cap_that_another_plugin_set_is_named():
    made = chain(2, slices="off")
    ((plugin, config),) = made.links
    bare = StepPlan(as_lengths([5, 200]), (), replace(made.limits, max_tokens=100))
    with pytest.raises(EvenloadError, match="longer than the least max_tokens of all plugins") as caught:
        plugin.plan(bare, made.context, config)
    assert caught.value.found == "sequence 1 has 200 tokens, the cap is 100"
    with pytest.raises(EvenloadError, match="the least max_tokens of all plugins is smaller than two blocks"):
        plugin.plan(bare, made.context, config.model_copy(update={"slices": "auto", "block_tokens": 128}))


@pytest.mark.parametrize("block", [1, 3, 64, 128])
def test_chunks_start_at_blocks(block):
    made = chain(2, max_tokens=255, block_tokens=block)
    plan = made.baseline("chunks", as_lengths([900, 256, 40]))
    assert plan.cut == {0, 1}
    assert {s.start % block for m in plan.micro_batches for s in m.slices} == {0}
    assert made.rivals.breaks("chunks", plan) == ""


@pytest.mark.parametrize(
    ("section", "broken"),
    [
        ({"block_tokens": 8}, ""),
        ({"slices": "off"}, "slices is off, 1 sequences are cut"),
        ({"block_tokens": 16}, "block_tokens is 16, a slice starts at 8"),
        ({"asymmetric": False}, "asymmetric is false, the backward has groups of its own"),
    ],
)
def test_a_plan_that_does_not_keep_a_setting_is_told_by_what_it_does(section, broken):
    row = tuple(MicroBatch((Slice(0, a, a + 8),), (0,)) for a in (0, 8))
    plan = StepPlan(as_lengths([16]), row, chain(1).limits, backward=row[::-1])
    assert breaks(plan, PackingConfig.model_validate(section)) == (f"plugins.packing.{broken}" if broken else "")


def test_a_rank_without_work_that_holds_too_much_is_refused():
    """Its dummy has one token, and what any pass takes."""
    with pytest.raises(EvenloadError, match=r"plugins\.packing\.activation_gib cannot hold what a rank must keep"):
        chain(3, activation_gib=1e-12).plan(as_lengths([1]))


def test_unknown_baselines_are_refused():
    with pytest.raises(EvenloadError, match="did you mean 'in_order'"):
        chain(2).baseline("inorder", as_lengths([5]))
