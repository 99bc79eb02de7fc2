"""Chunks of pipelines: every token once, equal time, under the cap, longest chains first; the mesh of algorithm 1."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.balance.slicing import evenly
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.errors import EvenloadError
from evenload.core.machine.cluster import load
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.setting import RECIPES
from evenload.plugins.pipeline.baselines import on_one_mesh
from evenload.plugins.pipeline.chunks import FACTORS, LARGEST, TOLERANCE, chunkings, chunks_of, counts
from evenload.plugins.pipeline.config import PipelineConfig
from hypothesis import given
from hypothesis import strategies as st

FORWARD = PassCost(launch_s=100.0, token_s=1.0, pair_s=0.01)
BACKWARD = PassCost(launch_s=200.0, token_s=2.0, pair_s=0.025)
PRICE = FORWARD.plus(BACKWARD)
AT = PlanningContext(
    Costs(source="made up", forward=FORWARD, backward=BACKWARD), Layout(pp=4), load("a100", RECIPES / "clusters")
)
LENGTHS = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


def seconds(pack):
    return float(sum(PRICE.seconds(s.length, s.start) for s in pack))


def tokens_once(packs, lengths):
    """Whether the packs, in their order, run every sequence from its first token to its last."""
    found = {}
    for pack in packs:
        assert len({s.sequence for s in pack}) == len(pack), "two slices of a sequence in one chunk"
        for s in pack:
            if s.start != found.get(s.sequence, 0):
                return False
            found[s.sequence] = s.stop
    return found == dict(enumerate(lengths))


@given(st.integers(1, 3000), st.integers(1, 20), st.integers(4, 500), st.integers(1, 4))
def test_a_sequence_is_cut_at_equal_cost_under_the_cap(length, count, cap, block):
    slices = evenly(7, length, count, PRICE, cap, block)
    assert tokens_once([[s._replace(sequence=0)] for s in slices], [length])
    assert all(s.length <= cap for s in slices)
    assert all(s.stop % block == 0 for s in slices[:-1])
    if cap >= length and length >= 4 * count * block:
        assert len(slices) == count
        # One block more or less at either end.
        block_s = float(PRICE.seconds(2 * block, length))
        assert max(seconds([s]) for s in slices) - min(seconds([s]) for s in slices) <= block_s


@given(LENGTHS, st.integers(1, 3), st.integers(64, 1500), st.sampled_from([1, 3, 64]), st.sampled_from([1, 2, 4]))
def test_chunkings_hold_every_token_once_in_order_under_the_cap(lengths, ranks, cap, most, stages):
    limits = Limits(num_ranks=ranks, max_tokens=cap, num_stages=stages)
    bare = StepPlan(as_lengths(lengths), (), limits)
    config = PipelineConfig(chunks=most, max_tokens=cap)
    if most == 1 and max(lengths) > cap:
        with pytest.raises(EvenloadError, match=f"has {max(lengths)} tokens, the cap is {cap}"):
            list(chunkings(bare, limits, AT, config))
        return
    found = list(chunkings(bare, limits, AT, config))
    assert found
    for plan in found:
        cp_groups = {s.sequence: m.ranks for m in plan.micro_batches for s in m.slices}
        assert all(cp_groups[s.sequence] == m.ranks for m in plan.micro_batches for s in m.slices)
        assert tokens_once([list(m.slices) for m in plan.micro_batches], lengths)
        assert all(m.num_tokens <= cap for m in plan.micro_batches)
        assert all(plan.of_rank(rank) for rank in range(ranks)), "every rank has at least a dummy"
        assert not plan.order
        counts = [sum(s.sequence == i for m in plan.micro_batches for s in m.slices) for i in range(len(lengths))]
        assert all(c <= max(most, -(-n // (cap - cap % 4)) + 1) for c, n in zip(counts, lengths, strict=True))


def test_chunks_take_equal_time_and_sequences_of_most_chunks_come_first():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(300), 1.4, 200), 2, 20000).astype(np.int64)
    slice_s = float(PRICE.seconds(lengths).sum()) / 40
    packs = chunks_of(list(range(200)), lengths, PRICE, slice_s, 1 << 30, 64, 4)
    each = [seconds(pack) for pack in packs]
    assert tokens_once(packs, lengths.tolist())
    assert max(each) <= slice_s * (1 + TOLERANCE) * 1.01
    assert max(each) / np.mean(each) < 1 + TOLERANCE
    chains = [next((s.sequence for s in pack if s.length < lengths[s.sequence]), None) for pack in packs]
    sizes = [chains.count(one) if one is not None else 1 for one in chains]
    assert sizes[0] >= 4
    assert all(a >= b for a, b in pairwise(sizes))


@given(LENGTHS, st.integers(1, 12), st.integers(200, 2500))
def test_algorithm_1_cuts_all_sequences_at_one_mesh(lengths, count, cap):
    packs = on_one_mesh(list(range(len(lengths))), np.array(lengths), PRICE, count, cap, 4)
    assert tokens_once(packs, lengths)
    mesh = {s.stop for pack in packs for s in pack if s.sequence == int(np.argmax(lengths))}
    assert all(s.stop in mesh for pack in packs for s in pack if s.stop < lengths[s.sequence])
    assert all(sum(s.length for s in pack) <= cap for pack in packs)


@pytest.mark.parametrize(("stages", "ranks"), [(4, 1), (16, 8), (8, 64)])
def test_the_number_of_chunks_is_bounded_over_all_ranks_and_stages(stages, ranks):
    limits = Limits(num_ranks=ranks, max_tokens=1 << 14, num_stages=stages)
    found = counts(np.full(4096, 5000), PRICE.model_copy(update={"launch_s": 1e-9}), limits)
    assert max(found) * ranks * stages <= max(FACTORS) * max(LARGEST, 2 * stages * ranks * stages)
    assert max(found) >= 2 * stages


def _of(ranks):
    return replace(AT, layout=Layout(pp=4, dp=ranks))


def test_what_ranks_share_stays_on_them_and_the_rest_is_dealt_beside_it():
    lengths = [5000, *range(300, 1500, 50), *[700] * 12]
    limits = Limits(num_ranks=4, max_tokens=2000, num_stages=4)
    shared = tuple(MicroBatch((Slice(0, a, a + 1000),), (1, 2), 0, "all_to_all") for a in range(0, 5000, 1000))
    came = StepPlan(as_lengths(lengths), (*shared, MicroBatch((Slice(1, 0, 300),), (0,))), limits)
    for plan in list(chunkings(came, limits, _of(4), PipelineConfig(max_tokens=2000)))[:3]:
        long = [m for m in plan.micro_batches if any(s.sequence == 0 for s in m.slices)]
        assert {(m.ranks, m.cp_comm) for m in long} == {((1, 2), "all_to_all")}
        # First in both ranks, whatever their number: so they are in rounds.
        assert list(plan.micro_batches[: len(long)]) == long
        assert tokens_once([list(m.slices) for m in plan.micro_batches], lengths)
        seconds_s = [0.0] * 4
        for m in plan.micro_batches:
            for rank in m.ranks:
                seconds_s[rank] += PRICE.launch_s + seconds(list(m.slices)) / len(m.ranks)
        assert max(seconds_s) < 1.15 * sum(seconds_s) / 4


def test_sequences_that_are_shared_in_part_alone_are_dealt_like_others():
    limits = Limits(num_ranks=2, max_tokens=2000, num_stages=4)
    parts = MicroBatch((Slice(0, 0, 1000),), (0, 1), 0, "ring"), MicroBatch((Slice(0, 1000, 1500),), (0,))
    came = StepPlan(as_lengths([1500]), parts, limits)
    assert all(len(m.ranks) == 1 for m in next(chunkings(came, limits, _of(2), PipelineConfig())).micro_batches)


def test_what_is_shared_stays_so_only_where_it_can_be_ordered():
    """Ranks that run in step, since they share experts, have no order of rounds beside shared micro-batches."""
    parts = tuple(MicroBatch((Slice(0, start, start + 500),), (0, 1), 0, "ring") for start in (0, 500))
    for in_step, shares in ((1, True), (2, False)):
        limits = Limits(num_ranks=2, max_tokens=2000, num_stages=4, in_step=in_step)
        came = StepPlan(as_lengths([1000, 40]), parts, limits)
        plans = [plan for plan in chunkings(came, limits, _of(2), PipelineConfig()) if plan.micro_batches]
        assert any(len(m.ranks) > 1 for plan in plans for m in plan.micro_batches) == shares
