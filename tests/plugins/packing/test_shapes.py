"""``round_tokens`` and ``largest_first``: their laws, their price in plan and simulator, and plans of any lengths."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, as_lengths
from evenload.core.planning.judge import certified_s, judge
from evenload.runtime.attention.pack import IGNORE, build_pack
from hypothesis import given
from hypothesis import strategies as st

from ..chains import chain_of


def chain(trainer="deepspeed", cap=1000, **packing):
    own = {"enabled": True, "max_tokens": cap, **packing}
    return chain_of({"trainer": trainer, "parallel": {"dp": 2}, "plugins": {"packing": own}})


@given(
    lengths=st.lists(st.integers(2, 1500), min_size=1, max_size=24),
    multiple=st.sampled_from([1, 64, 100, 512]),
    slices=st.sampled_from(["off", "even", "auto"]),
    trainer=st.sampled_from(["deepspeed", "megatron"]),
)
def test_plans_of_any_lengths_are_filled_up_under_the_cap(lengths, multiple, slices, trainer):
    if slices == "off":
        lengths = [min(length, 500) for length in lengths]
    made = chain(trainer, round_tokens=multiple, largest_first=True, slices=slices)
    plan = check(made.plan(as_lengths(lengths)))
    for m in (*plan.micro_batches, *plan.backward):
        assert not m.slices or m.num_padded_tokens % multiple == 0
        assert m.num_padded_tokens <= 1000
    assert certified_s(plan, made.context) <= judge(plan, made.context).step_s * (1 + 1e-9)
    if plan.is_sortable:
        for rank in range(2):
            tokens = [plan.micro_batches[i].num_padded_tokens for i in plan.of_rank(rank)]
            assert tokens == sorted(tokens, reverse=True)


def test_laws_refuse_what_is_not_filled_up_or_not_in_order():
    made = chain(round_tokens=128, largest_first=True, slices="off", cap=1024)
    plan = made.plan(as_lengths([1000, 900, 800, 200]))
    assert plan.num_padded_tokens > plan.num_tokens
    bare = tuple(m._replace(round_to=0) for m in plan.micro_batches)
    with pytest.raises(PlanError, match="not filled up"):
        check(plan.revised(micro_batches=bare))
    ascending = tuple(sorted(plan.micro_batches, key=lambda m: m.num_padded_tokens))
    with pytest.raises(PlanError, match="does not run first"):
        check(plan.revised(micro_batches=ascending))


def test_filling_up_costs_linear_work_and_moves_the_digest():
    made = chain(slices="off")
    bare = MicroBatch((Slice(0, 0, 100),), (0,))
    filled = bare._replace(round_to=128)
    costs = made.context.costs
    for one, other in zip(costs.micro_batch_s(filled), costs.micro_batch_s(bare), strict=True):
        assert one > other
    forward, backward = costs.micro_batches_s([filled, bare])
    assert [forward[0], backward[0]] == pytest.approx(costs.micro_batch_s(filled))
    extra = costs.micro_batch_s(filled)[0] - costs.micro_batch_s(bare)[0]
    assert extra == pytest.approx(28 * costs.forward.linear_s)
    plan = made.plan(as_lengths([100]))
    assert plan.revised(micro_batches=(filled,)).digest != plan.revised(micro_batches=(bare,)).digest


def test_what_fills_a_pack_up_has_no_sample_and_no_target():
    tokens = np.arange(1, 11)
    pack = build_pack(MicroBatch((Slice(0, 0, 10),), (0,), round_to=16), lambda _: tokens)
    assert (pack.num_padded_tokens, pack.num_targets) == (16, 9)
    assert set(pack.labels_T[9:].tolist()) == {IGNORE}


def test_a_cap_without_a_multiple_is_refused():
    with pytest.raises(EvenloadError, match="holds no multiple of round_tokens 2048"):
        chain(round_tokens=2048)
