"""The bound of a step against plans of every kind: drawn at random, of the planner, of its baselines."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from evenload.core.errors import EvenloadError, PlanError
from evenload.core.laws import check
from evenload.core.plan.rounds import levelled
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import tokens_of_ranks
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.baselines import BASELINES
from evenload.plugins.mesh.bounds import lower_bound_s
from evenload.plugins.mesh.config import MeshConfig
from evenload.plugins.mesh.cost_table import cost_table_of
from hypothesis import assume, given
from hypothesis import strategies as st

from ..chains import chain_of

RANKS, NODE, CAP = 6, 4, 256
FAST_LINKS = {"intra": {"latency_s": 1e-7, "bytes_per_s": 1e12}, "inter": {"latency_s": 1e-6, "bytes_per_s": 1e11}}
SLOW_LINKS = {"intra": {"latency_s": 1e-6, "bytes_per_s": 2e9}, "inter": {"latency_s": 1e-5, "bytes_per_s": 2e8}}


@cache
def chain(*, slow, zero, ranks=RANKS, node=NODE, pp=1, tp=1, again=False):
    """Attention equals the linear work at 200 tokens."""
    made = chain_of(
        {
            "trainer": "deepspeed" if zero else "megatron",
            "deepspeed": {"zero_stage": 3 if zero else 0},
            "model": {"num_layers": 2 * pp, "hidden_size": 64, "num_attention_heads": 8},
            "parallel": {"dp": ranks, "pp": pp, "tp": tp},
            "train": {"recompute": again},
            "plugins": {"mesh": {"enabled": True, "max_tokens": CAP}},
        }
    )
    at = made.context
    passes = {
        name: at.costs.forward.model_copy(update={"launch_s": 1e-5, "token_s": f * 1e-6, "pair_s": f * 1e-8})
        for name, f in (("forward", 1.0), ("backward", 2.0))
    }
    links = SLOW_LINKS if slow else FAST_LINKS
    cluster = at.cluster.model_validate(at.cluster.model_dump() | links | {"ranks_per_node": node})
    context = replace(at, costs=at.costs.model_copy(update=passes), cluster=cluster)
    return replace(made, context=context, limits=replace(made.limits, max_tokens=CAP, node_ranks=node))


def drawn_plan(lengths, limits, seed, *, cut=False):
    """Sequences on random sets of ranks, up to three in a micro-batch; ``cut``: in two slices, one after the other."""
    random = np.random.default_rng(seed)
    cp_comm = str(random.choice(["ring", "all_gather", "all_to_all"]))
    left, made = [Slice(i, 0, n) for i, n in enumerate(lengths)], []
    while left:
        cp_groups = []
        for s in left[: int(random.integers(1, 4))]:
            degree = max(int(random.integers(1, RANKS + 1)), -(-s.length // (CAP - 8)))
            cp_groups.append(
                tuple(sorted(random.permutation(RANKS)[: min(degree, RANKS, max(1, s.length // 8))].tolist()))
            )
        while len(cp_groups) > 1 and any(n > CAP for n in tokens_of_ranks(shared(left, cp_groups, cp_comm)).values()):
            cp_groups.pop()
        mine, left = left[: len(cp_groups)], left[len(cp_groups) :]
        if not cut:
            made.append(
                shared(mine, cp_groups, cp_comm)._replace(remap=bool(random.integers(2)) and len(cp_groups[0]) > 1)
            )
            cp_comm = str(random.choice(["ring", "all_gather", "all_to_all"]))
            continue
        middle = [s._replace(stop=s.length // 2) for s in mine]
        made.append(shared(middle, cp_groups, cp_comm))
        made.append(shared([Slice(i, n, lengths[i]) for i, _, n in middle], cp_groups, cp_comm))
    if limits.together > 1:
        made = levelled(made, RANKS)
    busy = {rank for m in made for rank in m.ranks}
    made += [MicroBatch((), (rank,)) for rank in range(RANKS) if rank not in busy]
    ops = (*(Op("F", i) for i in range(len(made))), *(Op("B", i) for i in reversed(range(len(made)))))
    return StepPlan(as_lengths(lengths), tuple(made), limits, order=(ops,) if cut else ())


def shared(slices, cp_groups, cp_comm):
    """The first slices, as many as there are CP groups."""
    mine, ranks = tuple(slices[: len(cp_groups)]), tuple(sorted({rank for cp_group in cp_groups for rank in cp_group}))
    return MicroBatch(mine, ranks) if len(ranks) == 1 else MicroBatch(mine, ranks, 0, cp_comm, 0, tuple(cp_groups))


LENGTHS = st.lists(st.one_of(st.integers(1, 200), st.integers(200, RANKS * CAP - 100)), min_size=1, max_size=12)


def step_s(plan, made):
    """Of a lawful plan; others are not drawn."""
    try:
        check(plan)
    except PlanError:
        assume(False)
    return simulate(plan, made.context, record=False).step_s


@given(LENGTHS, st.booleans(), st.booleans(), st.integers(0, 99))
def test_no_random_plan_is_below_the_bound(lengths, slow, zero, seed):
    made = chain(slow=slow, zero=zero)
    plan = drawn_plan(lengths, made.limits, seed)
    found = step_s(plan, made)
    config = MeshConfig(remap="auto" if any(m.remap for m in plan.micro_batches) else "off")
    bound = lower_bound_s(np.array(lengths), uncut(made.limits), made.context, config)
    assert bound <= found * (1 + 1e-9)
    assert lower_bound_s(np.array(lengths), made.limits, made.context, MeshConfig()) <= bound * (1 + 1e-3)


@given(LENGTHS, st.booleans(), st.integers(0, 99))
def test_no_random_plan_of_slices_is_below_the_bound(lengths, slow, seed):
    made = chain(slow=slow, zero=False)
    found = step_s(drawn_plan(lengths, made.limits, seed, cut=True), made)
    assert lower_bound_s(np.array(lengths), made.limits, made.context, MeshConfig()) <= found * (1 + 1e-9)


@given(LENGTHS, st.booleans(), st.integers(0, 99), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans())
def test_no_random_plan_of_stages_and_tensor_parallel_ranks_is_below_the_bound(lengths, slow, seed, pp, tp, again):
    made = chain(slow=slow, zero=False, pp=pp, tp=tp, again=again)
    plan = drawn_plan(lengths, made.limits, seed)
    if again and pp == 1 and not plan.order:
        ops = (
            *(Op("F", i) for i in range(len(plan.micro_batches))),
            *(Op("B", i) for i in range(len(plan.micro_batches))),
        )
        plan = plan.revised(order=(ops,), replayed=tuple(i for i in range(len(plan.micro_batches)) if (seed >> i) % 2))
    found = step_s(plan, made)
    config = MeshConfig(remap="auto" if any(m.remap for m in plan.micro_batches) else "off")
    bounds = [lower_bound_s(np.array(lengths), made.limits, made.context, config)]
    bounds += [lower_bound_s(np.array(lengths), uncut(made.limits), made.context, config)] if not plan.order else []
    assert max(bounds) <= found * (1 + 1e-9)


@given(LENGTHS, st.booleans(), st.booleans())
def test_neither_the_planner_nor_its_baselines_are_below_the_bound(lengths, slow, zero):
    made = chain(slow=slow, zero=zero)
    batch = as_lengths(lengths)
    try:
        plans = [made.plan(batch), *(made.baseline(name, batch) for name in BASELINES)]
    except EvenloadError:
        assume(False)
    for plan in plans:
        bound = lower_bound_s(np.array(lengths), uncut(plan.limits), made.context, MeshConfig())
        assert 0 < bound <= simulate(plan, made.context, record=False).step_s * (1 + 1e-9), plan.made_by


def uncut(limits):
    """Limits of a host that runs whole sequences only."""
    return replace(limits, whole_sequences=True)


def best_of_all(lengths, made, config):
    """Every way to run sequences in one or two rounds on any subsets of four ranks that are powers of two."""
    cost_table = cost_table_of(made.context, made.limits, config, int(lengths.max()))
    seconds, degrees = cost_table.of(lengths).seconds, cost_table.degrees.tolist()
    cp_groups = [cp_group for d in degrees for cp_group in combinations(range(4), d)]
    column = [degrees.index(len(cp_group)) for cp_group in cp_groups]
    best = float("inf")
    for rounds in (1, 2):
        places = [(r, h) for r in range(rounds) for h in range(len(cp_groups))]
        inside = np.array([[r * 4 + rank for rank in cp_groups[h]] + [-1] * (4 - len(cp_groups[h])) for r, h in places])
        busy = np.zeros((len(places), 4 * rounds + 1))
        np.put_along_axis(busy, inside, 1.0, axis=1)
        busy = busy[:, :-1]
        time, held = np.zeros((1, 4 * rounds)), np.zeros((1, 4 * rounds))
        for k, n in enumerate(lengths.tolist()):
            mine = np.array([seconds[k, column[h]] for _, h in places])[:, None] * np.where(busy > 0, busy, 0)
            tokens = np.array([n / len(cp_groups[h]) for _, h in places])[:, None] * busy
            time = (time[:, None, :] + np.nan_to_num(mine, posinf=1e9)[None]).reshape(-1, 4 * rounds)
            held = (held[:, None, :] + tokens[None]).reshape(-1, 4 * rounds)
            fits = held.max(axis=1) <= CAP
            time, held = time[fits], held[fits]
        if len(time):
            steps = time.reshape(-1, rounds, 4).max(axis=2).sum(axis=1)
            best = min(best, float(steps.min()) + rounds * cost_table.launch_s)
    return best


@given(st.lists(st.integers(20, 4 * CAP - 40), min_size=1, max_size=4), st.booleans())
def test_no_plan_at_all_of_few_sequences_in_step_is_below_the_bound(lengths, slow):
    made = chain(slow=slow, zero=True, ranks=4, node=2)
    config = MeshConfig(engines=("all_to_all",), powers_of_two=True, remap="off", routed="off")
    best = best_of_all(np.array(lengths), made, config)
    assert lower_bound_s(np.array(lengths), uncut(made.limits), made.context, config) <= best * (1 + 1e-9)


def test_even_work_meets_the_bound():
    """As many equal sequences as ranks, no communication: nothing is left to certify."""
    made = chain(slow=False, zero=False)
    plan = StepPlan(
        as_lengths([200] * RANKS), tuple(MicroBatch((Slice(i, 0, 200),), (i,)) for i in range(RANKS)), made.limits
    )
    alone_s = sum(made.context.costs.micro_batch_s(plan.micro_batches[0]))
    bound = lower_bound_s(np.full(RANKS, 200), made.limits, made.context, MeshConfig())
    assert bound == pytest.approx(alone_s, rel=1e-3)


def test_one_long_sequence_is_bounded_by_its_own_best_degree():
    """Slow links: all ranks together would take a sixth of the compute, which no degree reaches."""
    made = chain(slow=True, zero=False)
    lengths = np.array([1200])
    bound = lower_bound_s(lengths, uncut(made.limits), made.context, MeshConfig(remap="off"))
    compute_s = float(made.context.costs.sequence_s(lengths)[0])
    assert bound > 1.05 * (compute_s / RANKS + made.context.costs.launch_s)


def test_hops_may_hide_behind_other_sequences_and_an_all_to_all_may_not():
    """Six sequences that no rank holds alone: rings on the same ranks compute while each other's hops travel."""
    made, lengths = chain(slow=True, zero=False), np.full(RANKS, 1000)
    launches_s = made.context.costs.launch_s * 1000 / CAP
    compute_s = float(made.context.costs.sequence_s(lengths).sum()) / RANKS + launches_s
    ring, exchange = (
        lower_bound_s(lengths, uncut(made.limits), made.context, MeshConfig(engines=(cp_comm,), remap="off"))
        for cp_comm in ("ring", "all_to_all")
    )
    assert ring == pytest.approx(compute_s, rel=1e-3)
    assert exchange > 1.02 * compute_s


def test_waiting_beside_a_long_sequence_counts_where_all_run_in_step():
    """Short sequences fit beside the long one by time, but the ranks beside it may hold only so many tokens."""
    lengths = np.array([1000, *[60] * 25])
    config = MeshConfig(engines=("all_to_all",), remap="off", routed="off")
    alone, in_rounds = (
        lower_bound_s(lengths, uncut(made.limits), made.context, config)
        for made in (chain(slow=True, zero=zero) for zero in (False, True))
    )
    assert in_rounds > alone


def test_no_sequences_take_no_time():
    made = chain(slow=False, zero=False)
    assert lower_bound_s(np.array([], dtype=np.int64), made.limits, made.context, MeshConfig()) == 0
