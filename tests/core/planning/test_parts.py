"""Equal parts of a large plane: lawful, no slower than the part that was planned, left out where they waste."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning import parts
from evenload.core.planning.judge import outcome_of
from evenload.core.planning.parts import MOST_WASTE, parts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..by_hand import chain_of

RANKS, COUNT = 32, 4


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Of eight ranks, a node of this cluster."""
    monkeypatch.setattr(parts, "FEWEST_RANKS", RANKS // COUNT)


@cache
def chain(*plugins, recompute=False, pp=1, zero=None):
    sections = {
        "trainer": "megatron" if zero is None else "deepspeed",
        "model": {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 8},
        "parallel": {"dp": RANKS, "pp": pp},
        "deepspeed": {"zero_stage": zero or 0},
        "train": {"global_batch_size": 4096, "recompute": recompute},
        "cluster": "h100",
    }
    return chain_of({name: {"max_tokens": 4096} for name in plugins}, **sections)


def alike(seed, each, longest):
    """Lengths of which every COUNT neighbours are nearly one, in no order."""
    draw = np.random.default_rng(seed)
    one = np.clip(draw.lognormal(np.log(400), 1.3, each), 16, longest).astype(np.int64)
    four = np.concatenate([one, one - draw.integers(0, 2, each), one, one - draw.integers(0, 3, each)])
    return draw.permutation(four).tolist()


PLUGINS = st.sampled_from([("packing",), ("mesh",), ("packing", "mesh")])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(8, 60), st.sampled_from([3000, 20_000]), PLUGINS, st.booleans())
def test_every_part_runs_the_plan_of_one(seed, each, longest, plugins, recompute):
    made, batch = chain(*plugins, recompute=recompute), as_lengths(alike(seed, each, longest))
    divided = parts_of(batch, made.caps, made.context)
    assert sorted(divided.members.ravel().tolist()) == list(range(len(batch)))
    assert (batch[divided.members] <= divided.lengths).all()
    limits, context = divided.plane(made.caps, made.context)
    *_, part = replace(made, limits=limits, context=context).in_turn(divided.lengths)
    block = 1 if plugins == ("mesh",) else made.links[0][1].model_dump()["block_tokens"]
    plan = divided.joined(part, StepPlan(batch, (), made.caps), made.caps, block)
    check(plan)
    assert len(plan.micro_batches) == COUNT * len(part.micro_batches)
    assert all(s.start % block == 0 for m in (*plan.micro_batches, *plan.backward) for s in m.slices)
    assert outcome_of(plan, made.context).passes_s <= outcome_of(part, context).passes_s * (1 + 1e-9)


@pytest.mark.parametrize("plugins", [("packing",), ("mesh",), ("packing", "mesh")])
def test_a_large_plane_is_planned_in_parts(plugins):
    made, batch = chain(*plugins), as_lengths(alike(1, 64, 3000))
    *_, plan = made.in_turn(batch)
    assert "4 equal parts of 8 ranks" in " ".join(plan.notes)
    assert plan.digest == list(made.in_turn(batch))[-1].digest
    assert plan.bound_s <= outcome_of(plan, made.context).step_s


def test_what_wastes_or_waits_is_not_divided():
    made, batch = chain("mesh"), as_lengths(alike(2, 40, 3000))
    assert parts_of(batch, made.caps, made.context)
    giant = as_lengths([*batch[:-1], 200_000])
    assert parts_of(giant, made.caps, made.context) is None, "three parts wait for the giant's"
    all_s = made.context.costs.sequence_s(giant).sum()
    assert made.context.costs.sequence_s(np.array([200_000]))[0] > MOST_WASTE * all_s
    assert parts_of(batch[:-1], made.caps, made.context) is None, "159 sequences are not alike by fours"
    for other in (chain("mesh", pp=2), chain("mesh", zero=3)):
        assert parts_of(batch, other.caps, other.context) is None
    assert parts_of(batch, replace(made.caps, num_ranks=8), made.context) is None


def test_a_sequence_too_short_for_its_slices_is_not_cut_like_the_planned_one():
    made = chain("mesh")
    halves = tuple(MicroBatch((Slice(0, at, at + 8),), (0,)) for at in (0, 8))
    divided = parts.Parts(np.array([[0], [1]]), as_lengths([16]), 8)
    limits, _ = divided.plane(made.caps, made.context)
    part = StepPlan(as_lengths([16]), halves, limits)
    for shorter, cuts in ((15, [(0, 4), (4, 15)]), (7, None)):
        incoming = StepPlan(as_lengths([16, shorter]), (), made.caps)
        plan = divided.joined(part, incoming, made.caps, block=4)
        assert (plan and [s[1:] for m in plan.micro_batches[2:] for s in m.slices]) == cuts
