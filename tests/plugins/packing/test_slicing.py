"""Slices: equal cost under caps, chains in order, plans within their bound, memory kept by replays."""

import math
from dataclasses import replace

import numpy as np
import pytest
from evenload.core.balance.bound import lower_bound_s
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.errors import EvenloadError
from evenload.core.laws import check
from evenload.core.machine import cluster as clusters
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import Slice, StepPlan, as_lengths
from evenload.core.planning.setting import RECIPES
from evenload.core.simulate.predict import micro_batch_imbalance, predict
from evenload.core.simulate.step import simulate
from evenload.plugins.packing import baselines
from evenload.plugins.packing.assemble import assemble
from evenload.plugins.packing.config import PackingConfig
from evenload.plugins.packing.plan import WORTH_A_CUT, plan
from evenload.plugins.packing.slicing import fill
from hypothesis import given
from hypothesis import strategies as st

from ..chains import heavy_tail

# A 7B model's ratio of linear to attention work (verl: 24576 s + s^2), backward 2x and 2.5x.
COSTS = Costs(
    source="24576 n + n^2",
    forward=PassCost(token_s=24576e-9, pair_s=2e-9),
    backward=PassCost(token_s=2 * 24576e-9, pair_s=5e-9),
)
A100 = clusters.load("a100", RECIPES / "clusters")
PRICE = PassCost(token_s=3.0, pair_s=0.01)


def planned(lengths, ranks, costs=COSTS, *, pp=1, in_step=False, limits=None, **config):
    limits = limits or Limits(ranks, 1 << 40, num_stages=pp, all_in_step=in_step)
    context = PlanningContext(costs, Layout(dp=ranks, pp=pp), A100)
    section = PackingConfig(**{"enabled": True, "slices": "even", **config})
    return check(plan(StepPlan(as_lengths(lengths), (), limits), context, section))


@given(st.integers(0, 10**9), st.floats(1e-9, 1e9))
def test_tokens_for_inverts_the_price(prefix, budget_s):
    assert PRICE.seconds(PRICE.tokens_within(prefix, budget_s), prefix) == pytest.approx(budget_s, rel=1e-12)


@pytest.mark.parametrize(
    ("price", "budget_s", "tokens"),
    [
        (PRICE, 0.0, 0.0),
        (PRICE, math.inf, math.inf),
        (PassCost(token_s=2.0), 8.0, 4.0),
        (PassCost(token_s=0.0, pair_s=2.0), 16.0, 4.0),
        (PassCost(token_s=0.0), 1.0, math.inf),
    ],
)
def test_tokens_at_the_ends_of_the_price(price, budget_s, tokens):
    assert price.tokens_within(0, budget_s) == tokens


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(64, 4000),
    st.sampled_from([1, 4, 16]),
)
def test_what_is_filled_is_everything_in_order_and_under_the_cap(sizes, count, cap, block):
    packs = fill(list(range(len(sizes))), np.array(sizes), PRICE, count, cap, block)
    if packs is None:
        assert sum(sizes) > 0.3 * count * cap, "only a tight cap may fail"
        return
    assert len(packs) <= count
    assert all(sum(s.length for s in pack) <= cap for pack in packs)
    assert all(len({s.sequence for s in pack}) == len(pack) for pack in packs)
    stop = [0] * len(sizes)
    for s in (s for pack in packs for s in pack):
        assert s.start == stop[s.sequence]
        assert s.start % block == 0
        stop[s.sequence] = s.stop
    assert stop == sizes


@pytest.mark.parametrize("count", [2, 5, 16])
def test_slices_are_equal_in_cost_and_not_in_tokens(count):
    packs = fill([0], np.array([100_000]), PRICE, count, 100_000, 1)
    costs = [sum(PRICE.seconds(s.length, s.start) for s in pack) for pack in packs]
    assert max(costs) / min(costs) < 1.01
    tokens = [pack[0].length for pack in packs]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 1.3 * tokens[-1]


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["even", "auto"]),
)
def test_every_plan_keeps_the_laws_and_the_bound(lengths, ranks, pp, recompute, equal, slices):
    costs = COSTS.recomputed(0.0) if recompute else COSTS
    made = planned(lengths, ranks, costs, pp=pp, in_step=equal and pp == 1, slices=slices, max_tokens=1024)
    busiest = max(predict(made, costs).busy_s)
    assert busiest >= lower_bound_s(made.lengths, made.limits, costs) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_micro_batches_of_long_documents_cost_alike_in_each_direction(seed):
    """With recomputation backward groups are free, so both directions are even; sample-level packs are 2x off."""
    costs = COSTS.recomputed(0.0)
    lengths = np.append(heavy_tail(seed, 511, 20_000), 40_000)
    made = planned(lengths, 64, costs)
    assert made.backward
    assert made.made_by == "packing (asymmetric)"
    assert max(micro_batch_imbalance(made, costs)) < 1.03
    # The bound grants the longest sequence that the forward of its last slice need not run.
    assert max(predict(made, costs).busy_s) < 1.15 * lower_bound_s(made.lengths, made.limits, costs)
    bare = StepPlan(as_lengths(lengths), (), Limits(64, 1 << 40))
    context = PlanningContext(costs, Layout(dp=64), A100)
    whole = baselines.whole(bare, context, PackingConfig(enabled=True))
    assert min(micro_batch_imbalance(whole, costs)) > 2.0


def test_without_recomputation_a_backward_of_its_own_is_not_worth_a_forward():
    made = planned(np.append(heavy_tail(1, 511, 20_000), 40_000), 64)
    assert not made.backward
    assert made.made_by == "packing"
    assert made.cut
    passes = [sum(COSTS.micro_batch_s(m)) for m in made.micro_batches]
    assert max(passes) / np.mean(passes) < 1.03


def test_equal_micro_batches_are_given_up_where_launches_make_them_slow():
    slow = COSTS.model_copy(
        update={
            "forward": COSTS.forward.model_copy(update={"launch_s": 0.2}),
            "backward": COSTS.backward.model_copy(update={"launch_s": 0.4}),
        }
    )
    lengths = np.append(heavy_tail(1, 511, 20_000), 40_000)
    cheap, dear = planned(lengths, 64), planned(lengths, 64, slow)
    assert len(dear.micro_batches) < len(cheap.micro_batches)
    assert max(len(dear.of_rank(r)) for r in range(64)) == 3, "40,000 tokens in micro-batches of 16,384"


def test_auto_cuts_nothing_that_need_not_be_cut():
    lengths = [900, 700, 500, 400, 300, 40]
    assert planned(lengths, 2, max_tokens=1024).cut
    assert not planned(lengths, 2, slices="auto", max_tokens=1024).cut
    longer = planned([5000, *lengths], 2, slices="auto", max_tokens=1024)
    assert longer.digest == planned([5000, *lengths], 2, max_tokens=1024).digest


def test_auto_cuts_where_that_makes_the_step_faster():
    lengths = heavy_tail(3, 64, 16_000)
    assert planned(lengths, 2, pp=4, slices="auto").cut
    # In rounds, 8000 tokens wait beside eight samples of 1000, which cost less.
    assert planned([8000, 8000, *[1000] * 24], 4, slices="auto", in_step=True, max_tokens=8000).cut


def test_a_pipeline_gets_smaller_micro_batches():
    lengths = heavy_tail(3, 64, 16_000)
    made = planned(lengths, 2, pp=4)
    context = PlanningContext(COSTS, Layout(dp=2, pp=4), A100)
    bare = StepPlan(as_lengths(lengths), (), Limits(2, 1 << 40, num_stages=4))
    whole = check(baselines.whole(bare, context, PackingConfig(enabled=True)))
    assert predict(made, COSTS).step_s < 0.8 * predict(whole, COSTS).step_s


def test_ranks_in_step_run_all_forwards_then_all_backwards():
    made = planned([9000, 500, 400, 300], 2, in_step=True, max_tokens=2048)
    for rank in range(2):
        kinds = "".join(op.kind for op in made.order[0] if op.micro_batch in set(made.of_rank(rank)))
        count = len(made.of_rank(rank))
        assert kinds == "F" * count + "B" * count


MEMORY = MemoryCost(activation_bytes_per_token=1024.0, kv_bytes_per_token=64.0, kv_grad_bytes_per_token=64.0)


def test_replays_bring_a_chain_under_the_cap_and_no_further():
    """16 slices of 1,024 tokens at 1 KiB a token: KV takes 1 MiB, its gradients 15/16 of one, then a slice 1 MiB and
    its attention 3/4 of one."""
    limits = replace(Limits(1, 1 << 40, layers_per_stage=1), memory=MEMORY)
    mib = 1 / 1024
    flat = Costs(source="x", forward=PassCost(token_s=1.0), backward=PassCost(token_s=2.0))
    kept = {}
    for gib in (20 * mib, 8.1 * mib, 4.1 * mib):  # the plan of the last is checked below
        made = planned([16384], 1, flat, limits=limits, max_tokens=1024, activation_gib=gib)
        assert peaks_of_stage(made, 0)[0][0] <= gib * 2**30
        kept[gib] = 16 - len(made.replayed)
    assert kept == {20 * mib: 16, 8.1 * mib: 5, 4.1 * mib: 1}
    assert made.replayed == tuple(range(15)), "the first slices are replayed: they would wait longest"
    with pytest.raises(EvenloadError, match=r"0\.0036 GiB at the least .* cap is 0\.00195") as caught:
        planned([16384], 1, flat, limits=limits, max_tokens=1024, activation_gib=2 * mib)
    assert "lower plugins.packing.max_tokens" in caught.value.do
    with pytest.raises(EvenloadError, match="cannot hold the keys and values") as caught:
        planned([16384], 1, flat, limits=limits, max_tokens=1024, activation_gib=1.5 * mib)
    assert "data.max_length" in caught.value.do


def test_smaller_micro_batches_are_made_where_only_they_fit():
    """K, V and their gradients take 2 MiB, a micro-batch of max_tokens 8 MiB; 5 MiB hold them with less than 3,072."""
    limits = replace(Limits(1, 1 << 40, layers_per_stage=1), memory=MEMORY)
    flat = Costs(source="x", forward=PassCost(token_s=1.0), backward=PassCost(token_s=2.0))
    made = planned([16384], 1, flat, limits=limits, max_tokens=8192, activation_gib=5 / 1024)
    assert max(m.num_tokens for m in made.micro_batches) <= 3072
    assert peaks_of_stage(made, 0)[0][0] <= 5 * 2**20


def test_replays_are_the_same_on_ranks_in_step():
    limits = replace(Limits(2, 1 << 40, layers_per_stage=1, all_in_step=True), memory=MEMORY)
    made = planned([16384, 2000], 2, limits=limits, max_tokens=1024, activation_gib=6 / 1024)
    rows = [[made.of_rank(r).index(j) for j in made.replayed if j in set(made.of_rank(r))] for r in range(2)]
    assert rows[0]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("cap", "block"), [(8, 16), (6, 4)])
def test_a_cap_that_the_last_two_blocks_may_exceed_is_refused(cap, block):
    with pytest.raises(EvenloadError, match="smaller than two blocks"):
        planned([100], 1, max_tokens=cap, block_tokens=block)
    assert check(planned([100], 1, max_tokens=2 * block - 1, block_tokens=block))


@pytest.mark.parametrize("slices", ["auto", "even"])
def test_blocks_that_leave_no_room_for_equal_slices_end_in_chunks(slices):
    """The last micro-batch keeps a whole sequence beside less room than a block, however many there are."""
    made = check(planned([2876, 248, 101, 51], 1, max_tokens=343, block_tokens=128, slices=slices))
    assert max(m.num_tokens for m in made.micro_batches) <= 343
    assert {s.start % 128 for m in made.micro_batches for s in m.slices} == {0}


def test_hosts_of_whole_sequences_get_whole_sequences():
    limits = Limits(2, 1 << 40, whole_sequences=True)
    assert not planned([900, 400, 30, 20], 2, limits=limits, max_tokens=1024).cut
    with pytest.raises(EvenloadError, match="2000 tokens, the cap is 1024"):
        planned([2000, 400], 2, limits=limits, max_tokens=1024)


def test_chains_end_before_the_next_begins():
    """Two chains and a micro-batch of whole sequences: few activations are alive at a time."""
    bare = StepPlan(as_lengths([20, 5, 25]), (), Limits(1, 10))
    packs = [
        [Slice(0, 0, 10)],
        [Slice(0, 10, 20)],
        [Slice(1, 0, 5)],
        [Slice(2, 0, 9)],
        [Slice(2, 9, 17)],
        [Slice(2, 17, 25)],
    ]
    made = check(assemble(bare, bare.limits, [packs]))
    assert " ".join(f"{op.kind}{op.micro_batch}" for op in made.order[0]) == "F0 F1 B1 B0 F2 B2 F3 F4 F5 B5 B4 B3"
    two = check(
        assemble(replace(bare, limits=replace(bare.limits, num_stages=2)), Limits(1, 10, num_stages=2), [packs])
    )
    assert "".join(op.kind for op in two.order[1]) == "FFBBFBFFFBBB"
    assert "".join(op.kind for op in two.order[0]) == "FFBFBFFFBBBB"


def test_own_backward_groups_are_taken_only_where_their_replays_fit():
    """The same batch on a device that holds a replayed micro-batch, and on one that does not."""
    costs = COSTS.recomputed(64.0).model_copy(
        update={"memory": COSTS.memory.model_copy(update={"activation_bytes_per_token": 64.0})}
    )
    lengths = np.append(heavy_tail(1, 511, 20_000), 40_000)
    memory = MemoryCost(activation_bytes_per_token=32 * 2.0, replay_bytes_per_token=32 * 2.0**15)
    limits = Limits(64, 1 << 40, layers_per_stage=32, memory=memory)
    situations = {
        name: PlanningContext(costs, Layout(dp=64), A100.model_copy(update={"memory_bytes": size}))
        for name, size in (("large", 2**40), ("small", 2**30))
    }
    bare = StepPlan(as_lengths(lengths), (), limits)
    made = {
        name: check(plan(bare, one, PackingConfig(enabled=True, slices="even"))) for name, one in situations.items()
    }
    assert made["large"].backward
    assert not made["small"].backward


def test_without_a_cap_replays_bring_a_long_chain_into_the_device():
    """One sequence on a pipeline, on a device that holds the activations of its whole chain, and on a smaller one."""
    costs = COSTS.model_copy(
        update={"memory": COSTS.memory.model_copy(update={"activation_bytes_per_token": 8.0 * 2**20})}
    )
    memory = MemoryCost(activation_bytes_per_token=8 * float(2**18))
    limits = Limits(1, 1 << 40, num_stages=4, layers_per_stage=8, memory=memory)
    bare = StepPlan(as_lengths([65536, 500, 900]), (), limits)
    config = PackingConfig(enabled=True, max_tokens=8192)
    made, room = {}, {"large": 2.0**40, "small": 2.0**36}
    for name, size in room.items():
        cluster = A100.model_copy(update={"memory_bytes": size / 0.9})
        made[name] = check(plan(bare, PlanningContext(costs, Layout(pp=4), cluster), config))
    assert not made["large"].replayed
    assert made["small"].replayed
    held = {
        name: max(peak for stage in range(4) for peak, _ in peaks_of_stage(one, stage)) for name, one in made.items()
    }
    assert held["large"] > room["small"] >= held["small"]
    assert made["small"].limits.max_activation_bytes == float("inf")


@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (2, 4), (4, 2)]), st.sampled_from(["auto", "even"]))
def test_never_slower_than_chunks(seed, sizes, slices):
    ranks, pp = sizes
    lengths = heavy_tail(seed, 24, 60_000)
    costs = COSTS.model_copy(update={"forward": COSTS.forward.model_copy(update={"launch_s": 0.02})})
    limits = Limits(ranks, 1 << 40, num_stages=pp)
    bare, context = StepPlan(as_lengths(lengths), (), limits), PlanningContext(costs, Layout(dp=ranks, pp=pp), A100)
    config = PackingConfig(enabled=True, max_tokens=8192, slices=slices)
    ours, chunks = check(plan(bare, context, config)), check(baselines.chunks(bare, context, config))
    ours_s, chunks_s = (simulate(one, context, record=False).step_s for one in (ours, chunks))
    assert ours_s <= chunks_s * (1 + 1.01 * WORTH_A_CUT)
