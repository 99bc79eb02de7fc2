"""Recomputed layers by stage and chunk: rows against the exact walk, the program against every choice, refusals."""

import itertools
import re
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.costs.memory import peaks_of_stage
from evenload.core.input.format import GIB
from evenload.core.laws import check
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.order import in_slots, orders_of_stage
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.simulate.step import simulate
from evenload.plugins.pipeline import checkpointing
from evenload.plugins.pipeline.checkpointing import DoesNotFitError, fitted
from evenload.plugins.pipeline.chunks import chunkings
from evenload.plugins.pipeline.config import PipelineConfig
from evenload.plugins.pipeline.elastic import ordered, teams_of
from evenload.plugins.pipeline.memory_rows import MemoryRows, Probes, levels_of
from evenload.plugins.pipeline.plan import plan as plan_of_plugin
from evenload.plugins.pipeline.recompute_milp import GAP, lowered, solved
from hypothesis import given
from hypothesis import strategies as st

from ..chains import device

CONFIG = PipelineConfig(solver_ms=1000)
GREEDY = PipelineConfig(solver_ms=0)
DEVICE = device(host_bytes_per_s=1e9)
PRICE = PassCost(launch_s=0.5, token_s=1.0, pair_s=0.01)
OF_A_LAYER = {
    "activation_bytes_per_token": 100.0,
    "kv_bytes_per_token": 2.0,
    "kv_grad_bytes_per_token": 4.0,
    "deferred_bytes_per_token": 9.0,
}
BESIDE = {
    "cut_saves_bytes_per_token": 3.0,
    "head_bytes_per_token": 20.0,
    "head_working_bytes_per_token": 30.0,
    "working_bytes_per_token": 5.0,
    "pass_bytes": 7.0,
    "gradient_bytes": 11.0,
}
"""Of a layer, where it is one of the layers that saves; else of a stage."""


def context(pp, dp=1):
    costs = Costs(source="test", forward=PRICE, backward=PRICE.scaled(2.0, 2.0))
    return PlanningContext(costs, Layout(pp=pp, dp=dp), DEVICE)


def limits(stages, layers, ranks=1, beside=BESIDE):
    of_layers = {name: layers * value for name, value in OF_A_LAYER.items()}
    saves = layers * beside.get("cut_saves_bytes_per_token", 0.0)
    return Limits(
        ranks,
        1 << 20,
        num_stages=stages,
        layers_per_stage=layers,
        splits_backward=True,
        memory=MemoryCost(**{**beside, **of_layers, "cut_saves_bytes_per_token": saves}, input_bytes_per_token=8.0),
    )


def in_flight(plan, split=False):
    """1F1B in which a sequence's backward waits for its last chunk; ``split``: W's one backward later."""
    rows = [[] for _ in range(plan.limits.num_stages)]
    last = {s.sequence: i for i, m in enumerate(plan.micro_batches) for s in m.slices}
    for rank in range(plan.limits.num_ranks):
        forward = list(plan.of_rank(rank))
        place = {number: at for at, number in enumerate(forward)}
        need = {i: 1 + max(place[last[s.sequence]] for s in plan.micro_batches[i].slices) for i in forward}
        backward = sorted(forward, key=lambda i: (need[i], -i))
        for stage, row in enumerate(rows):
            ops = in_slots(forward, backward, [need[i] for i in backward], plan.limits.num_stages - 1 - stage)
            row += _with_weights(ops) if split else ops
    return check(replace(plan, order=tuple(map(tuple, rows))))


def _with_weights(ops):
    out, waiting = [], []
    for op in ops:
        out.append(op)
        if op.kind == "B":
            out += waiting
            waiting = [Op("W", op.micro_batch)]
    return out + waiting


def chunked(lengths, size, within, split=False):
    """Every sequence in chunks of ``size`` tokens, dealt to the ranks in turn, longest first."""
    micro_batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for start in range(0, lengths[index], size):
            s = Slice(index, start, min(start + size, lengths[index]))
            micro_batches.append(MicroBatch((s,), (index % within.num_ranks,)))
    return in_flight(StepPlan(as_lengths(lengths), tuple(micro_batches), within), split)


def shared(within):
    """Rank 0 and 1 share two micro-batches and have one each; rank 2 has two of its own."""
    parts = [(40, (0, 1)), (10, (0,)), (12, (1,)), (24, (2,)), (30, (1, 0)), (16, (2,))]
    micro_batches = tuple(MicroBatch((Slice(i, 0, n),), ranks) for i, (n, ranks) in enumerate(parts))
    plan = StepPlan(as_lengths([n for n, _ in parts]), micro_batches, replace(within, num_ranks=3))
    rows = []
    for stage in range(within.num_stages):
        rows.append(in_slots(range(6), range(6), range(1, 7), within.num_stages - 1 - stage))
    return check(replace(plan, order=tuple(map(tuple, rows))))


def capped(plan, share):
    """The plan under a cap ``share`` of the way from what it holds at the least to what it holds at the most."""
    most, least = (
        max(max(row) for stage in Probes(plan).levels(n) for row in stage) for n in (0, plan.limits.layers_per_stage)
    )
    return under(plan, least + share * (most - least))


def under(plan, room):
    return replace(plan, limits=replace(plan.limits, max_activation_bytes=room))


def held(plan):
    """The most that any rank of any stage holds."""
    return max(peak for stage in range(plan.limits.num_stages) for peak, _ in peaks_of_stage(plan, stage))


@st.composite
def plans(draw):
    stages, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    beside = draw(st.sampled_from([BESIDE, {}, {**BESIDE, "head_working_bytes_per_token": 400.0}]))
    if draw(st.integers(0, 4)) == 0:
        return shared(limits(stages, layers, beside=beside))
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    ranks = min(len(lengths), draw(st.integers(1, 2)))
    plan = chunked(lengths, draw(st.integers(8, 30)), limits(stages, layers, ranks, beside), draw(st.booleans()))
    count = len(plan.micro_batches)
    again = draw(st.one_of(st.just(set()), st.sets(st.integers(0, count - 1))))
    shares = st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=count, max_size=count)
    away = draw(st.one_of(st.just([]), shares))
    return check(plan.revised(replayed=tuple(sorted(again)), offload=tuple(away)))


def choices(plan, draw):
    """Any, of micro-batches whose activations wait."""
    each = st.tuples(
        *(st.integers(0, plan.limits.layers_per_stage * (i in plan.kept)) for i in range(len(plan.micro_batches)))
    )
    return tuple(draw(each) for _ in range(plan.limits.num_stages))


@given(st.data())
def test_rows_hold_what_the_walk_through_memory_finds(data):
    plan = data.draw(plans())
    chosen = choices(plan, data.draw)
    columns = {i: i for i in range(len(plan.micro_batches))}
    walked = levels_of(plan.revised(recompute=chosen))
    for stage in range(plan.limits.num_stages):
        for rank, ops in enumerate(orders_of_stage(plan, stage)):
            rows = Probes(plan).rows(stage, [rank], columns, -1.0)  # so that no pass fits, not one that holds nothing
            found = rows.held(np.array(chosen[stage]))
            levels = zip(ops, walked[stage][rank], strict=True)
            wanted = [level for op, level in levels if op.kind != "F" or op.micro_batch not in plan.kept]
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-6)


@given(st.data())
def test_the_pass_after_a_forward_holds_at_least_as_much(data):
    """Why forwards that keep something need no row."""
    plan = data.draw(plans())
    walked = levels_of(plan.revised(recompute=choices(plan, data.draw)))
    kept = {Op("F", i) for i in plan.kept}
    for stage in range(plan.limits.num_stages):
        for ops, levels in zip(orders_of_stage(plan, stage), walked[stage], strict=True):
            pairs = list(itertools.pairwise(zip(ops, levels, strict=True)))
            assert all(before <= after * (1 + 1e-12) for (op, before), (_, after) in pairs if op in kept)


@given(plans(), st.floats(0.02, 0.98), st.booleans())
def test_what_is_fitted_fits_and_no_stage_recomputes_a_layer_too_many(plan, share, solver):
    tight = capped(plan, share)
    found = check(fitted(tight, context(plan.limits.num_stages, plan.limits.num_ranks), CONFIG, solver=solver))
    room = tight.limits.max_activation_bytes
    assert held(found) <= room
    assert found.order == plan.order
    assert found.micro_batches == plan.micro_batches
    refuse_a_layer_too_many(found, room)


def refuse_a_layer_too_many(found, room):
    """Each layer that is recomputed is missed by its stage."""
    for stage, row in enumerate(found.recompute):
        for number, layers in enumerate(row):
            if layers:
                less = (*row[:number], layers - 1, *row[number + 1 :])
                one_less = found.revised(recompute=(*found.recompute[:stage], less, *found.recompute[stage + 1 :]))
                peaks = peaks_of_stage(one_less, stage)
                assert max(peak for peak, _ in peaks) > room * (1 - 1e-6)


def test_other_peoples_chunks_recompute_no_layer_too_many_either():
    """With one number of layers for all they are the fastest here; most of these layers are not needed."""
    given = under(StepPlan(as_lengths([75, 10]), (), replace(limits(2, 4), max_tokens=64)), 15_000.0)
    found = check(plan_of_plugin(given, context(2), PipelineConfig(max_tokens=64, block_tokens=16, solver_ms=0)))
    assert found.made_by == "pipeline (fixed_chunks)"
    assert any(map(any, found.recompute))
    refuse_a_layer_too_many(found, 15_000.0)


def random_rows(seed, columns, layers):
    """In each row one column runs and up to three wait; what fits is a third of the way up from all layers of all."""
    random = np.random.default_rng(seed)
    own, sizes = np.arange(columns), random.uniform(0.5, 1.5, columns)
    saves = np.zeros((columns, columns))
    for row in range(columns):
        waiting = slice(row + 1, row + 1 + int(random.integers(1, 4)))
        saves[row, waiting] = sizes[waiting]
    least = random.uniform(0.9, 1.0, columns)
    every = least + saves.sum(axis=1) * layers
    one = every + sizes * (layers - 1)
    levels = np.array([one, one, every])
    room = least.max() + 0.35 * float((one - least).min())
    over = one > room
    return MemoryRows(saves[over], own[over], sizes[over], levels[:, over], room)


@pytest.mark.parametrize("seed", range(12))
def test_the_program_finds_the_best_of_all_choices(seed):
    layers = 2
    rows = random_rows(seed, 6, layers)
    weights = np.random.default_rng(seed).uniform(0.5, 2.0, 6)
    every = [np.array(one) for one in itertools.product(range(layers + 1), repeat=6)]
    fitting = [one for one in every if rows.fit(one)]
    assert fitting
    best = min(float(weights @ one) for one in fitting)
    found = solved(rows, weights, layers, solver_ms=1000)
    assert rows.fit(found)
    # Its rows are on the safe side by the first layer of a running micro-batch.
    safe = [
        one
        for one in fitting
        if (rows.held(np.maximum(one, 1)) + (rows.own_saves * (one == 0)) <= rows.budget_bytes).all()
    ]
    assert best - 1e-9 <= weights @ found <= (1 + GAP) * min(float(weights @ one) for one in safe) + 1e-9
    quick = lowered(rows, weights, np.full(6, layers))
    assert rows.fit(quick)
    assert weights @ quick >= best - 1e-9


@cache
def ragged():
    """A long tail of sequences in 70 chunks and packs, in elastic order."""
    lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 1.2, 60), 2, 900).astype(int)
    within = replace(limits(4, 8), max_tokens=400)
    bare = StepPlan(as_lengths(lengths), (), within)
    every = chunkings(bare, within, context(4), PipelineConfig(max_tokens=400))
    return capped(ordered(min(every, key=lambda plan: len(plan.micro_batches)), context(4)), 0.3)


def test_the_program_gains_where_chunks_are_unlike():
    plan, at = ragged(), context(4)
    quick, slow = (simulate(fitted(plan, at, config), at).step_s for config in (GREEDY, CONFIG))
    same = min(
        simulate(one, at).step_s
        for n in range(9)
        if held(one := plan.revised(recompute=((n,) * len(plan.micro_batches),) * 4))
        <= plan.limits.max_activation_bytes
    )
    assert slow < quick < same


def test_equal_questions_have_equal_answers():
    plan, at = ragged(), context(4)
    every = plan.revised(recompute=((5,) * len(plan.micro_batches),) * 4)
    assert fitted(plan, at, CONFIG).digest == fitted(every, at, CONFIG).digest


def test_ranks_that_share_nothing_do_not_matter_to_each_other():
    """Rank 0 of two recomputes what it would alone, whatever the other one runs."""
    both = [90, 20, 60, 20, 30, 20, 25, 20]
    room = capped(chunked(both[::2], 15, limits(3, 4)), 0.3).limits.max_activation_bytes
    two = under(chunked(both, 15, limits(3, 4, ranks=2)), room)
    alone = under(chunked(both[::2], 15, limits(3, 4)), room)
    beside_others = fitted(two, context(3, 2), CONFIG).recompute
    mine = list(two.of_rank(0))
    assert [tuple(row[i] for i in mine) for row in beside_others] == list(fitted(alone, context(3), CONFIG).recompute)


def test_nothing_is_recomputed_where_all_fits():
    plan = capped(chunked([90, 40, 20], 20, limits(4, 5)), 1.0)
    every = plan.revised(recompute=((5,) * len(plan.micro_batches),) * 4)
    assert fitted(every, context(4), CONFIG).recompute == ()


def test_a_recipe_that_recomputes_is_overruled_where_all_fits():
    recomputing = {"activation_bytes_per_token": 3 * 8.0, "replay_bytes_per_token": 3 * 100.0}
    own = limits(2, 3)
    plan = chunked([50, 20], 20, replace(own, memory=own.memory.model_copy(update=recomputing)))
    assert fitted(plan, context(2), CONFIG).recompute == ((0,) * 4,) * 2


def test_a_host_order_is_kept():
    """1F1B of the host's own on whole sequences, one stage: recomputation is all that is chosen."""
    bare = StepPlan(
        as_lengths([40, 30, 50]),
        tuple(MicroBatch((Slice(i, 0, n),), (0,)) for i, n in enumerate([40, 30, 50])),
        limits(1, 4),
    )
    plan = capped(bare, 0.5)
    found = check(fitted(plan, context(1), CONFIG))
    assert found.order == ()
    assert held(found) <= plan.limits.max_activation_bytes
    # One micro-batch at a time: the longest two have a layer or more again, the shortest none.
    assert found.recompute[0][2] >= found.recompute[0][0] >= found.recompute[0][1] == 0


def test_what_does_not_fit_is_told_with_what_would():
    """K and V of a cut sequence stay, whatever is recomputed."""
    room = 200 * 2.0 * 4  # K and V of 200 tokens in 4 layers: nothing is left beside them
    plan = under(chunked([200, 30], 25, limits(3, 4)), room)
    with pytest.raises(DoesNotFitError) as caught:
        fitted(plan, context(3), CONFIG)
    error = caught.value
    everything = plan.revised(recompute=((4,) * len(plan.micro_batches),) * 3)
    peaks = [peaks_of_stage(everything, stage)[error.most.rank][0] for stage in range(3)]
    assert peaks[error.most.stage] == max(peaks)
    assert error.missing_bytes == pytest.approx(max(peaks) - room)
    assert f"stage {error.most.stage}" in error.what
    assert f"{max(peaks) / GIB:.3g} GiB" in error.found
    assert f"{error.missing_bytes / GIB:.3g} GiB more" in error.found
    enough = re.search(r"activation_gib to (\S+)", error.do)
    told = float(enough[1]) * GIB
    assert held(fitted(under(plan, told), context(3), CONFIG)) <= told <= max(peaks) * 1.01


def test_a_device_that_is_too_small_is_not_told_to_raise_its_cap():
    at = context(3)
    small = replace(at, cluster=DEVICE.model_copy(update={"memory_bytes": 1000.0}))
    with pytest.raises(DoesNotFitError, match=r"lower plugins\.pipeline\.max_tokens"):
        fitted(chunked([200, 30], 25, limits(3, 4)), small, CONFIG)


@pytest.mark.parametrize("within", [limits(2, 4), Limits(1, 1 << 20, num_stages=2, splits_backward=True)])
def test_weights_that_leave_no_room_are_told(within):
    """Also where nothing is known of what activations hold."""
    at = context(2)
    memory = at.costs.memory.model_copy(update={"fixed_bytes": 2e12})
    heavy = replace(at, costs=at.costs.model_copy(update={"memory": memory}))
    with pytest.raises(DoesNotFitError, match=r"take 1.86e\+03 GiB, a device has 931 GiB") as caught:
        fitted(chunked([30, 20], 10, within), heavy, CONFIG)
    assert caught.value.do == "use more tensor or pipeline parallelism"


def test_a_backward_with_groups_of_its_own_is_left_alone_or_refused():
    within = limits(1, 4)
    plan = chunked([30, 20], 30, within)
    grouped = replace(plan, backward=plan.micro_batches)
    assert fitted(grouped, context(1), CONFIG).recompute == ()
    tight = under(grouped, 100.0)
    with pytest.raises(DoesNotFitError, match="groups of its own"):
        fitted(tight, context(1), CONFIG)


def test_a_forward_that_will_run_again_can_be_the_fullest_pass():
    """It holds a layer of 60 tokens while 100 wait; the pass behind it fits. One layer of one of the two is enough.

    The last stage does not run it: nobody reads the keys of a whole sequence.
    """
    plan = chunked([60, 50, 50], 60, limits(2, 2, beside={}))
    order = tuple(Op(kind, i) for kind, i in [("F", 1), ("F", 2), ("F", 0), ("B", 1), ("B", 2), ("B", 0)])
    replayed = under(check(replace(plan, order=(order, order), replayed=(0,))), 100 * 2 * 100.0 + 2000)
    assert [sum(row) for row in fitted(replayed, context(2), GREEDY).recompute] == [1, 0]


@pytest.mark.parametrize("missing", ["pulp", "highspy"])
def test_without_a_solver_the_quick_answer_stands(missing, monkeypatch):
    plan, at = ragged(), context(4)
    quick = fitted(plan, at, GREEDY)
    assert fitted(plan, at, CONFIG, solver=False).recompute == quick.recompute
    monkeypatch.setitem(sys.modules, missing, None)
    assert fitted(plan, at, CONFIG).recompute == quick.recompute


def test_a_solver_that_fails_is_told_of_and_the_quick_answer_stands(monkeypatch, caplog):
    def broken(**_):
        raise RuntimeError("libhighs is not for this machine")

    monkeypatch.setattr("pulp.HiGHS", broken)
    plan, at = ragged(), context(4)
    assert fitted(plan, at, CONFIG).recompute == fitted(plan, at, GREEDY).recompute
    assert "libhighs is not for this machine" in caplog.text


def test_ends_that_differ_by_rounding_alone_are_alike(monkeypatch):
    """Machines that add in another order take the same answer."""
    found = []
    for noise in (0.0, 1e-15, -1e-15):
        ends = iter([1.0, 1.0 + noise, 1.0])
        monkeypatch.setattr(checkpointing, "_ends", lambda plan, teams, at, ends=ends: [next(ends)])
        found.append(fitted(ragged(), context(4), CONFIG).recompute)
    assert found[0] == found[1] == found[2]


def test_a_program_too_large_for_its_box_is_not_tried():
    rows = random_rows(0, 6, 2)
    assert solved(rows, np.ones(6), 2, solver_ms=0) is None


def test_passes_that_delay_each_other_share_a_diagonal():
    """The k-th backward of a stage, the (k+1)-th of the next; chunks go backward from the last."""
    plan = chunked([30, 10, 10], 10, limits(3, 2))
    backwards = checkpointing._backwards(plan)
    assert backwards == [[2, 1, 0, 3, 4]]
    found = checkpointing._diagonals(plan, backwards, [0, 1, 2, 3, 4])
    assert found.tolist() == [[4, 3, 2, 5, 6], [3, 2, 1, 4, 5], [2, 1, 0, 3, 4]]


def test_ranks_that_share_are_one_team_and_a_shared_micro_batch_stands_with_its_first_rank():
    plan = shared(limits(2, 2))
    assert teams_of(plan) == [[0, 1], [2]]
    backwards = checkpointing._backwards(plan)
    assert backwards == [[0, 1, 4], [0, 2, 4], [3, 5]]
    first, last = checkpointing._diagonals(plan, backwards, [0, 1, 2, 4]).tolist()
    # In the order of time: rank 0 has places 0, 1 and 2, rank 1 alone micro-batch 2 at place 1.
    assert [last, first] == [[0, 1, 2, 3], [1, 3, 4, 5]]


def test_shared_micro_batches_without_an_order_are_fitted_by_the_plugin_too():
    """A stage's order would name a shared one once, its ranks' lists name it twice."""
    parts = [(40, (0, 1)), (10, (0,)), (12, (1,))]
    micro_batches = tuple(MicroBatch((Slice(i, 0, n),), ranks) for i, (n, ranks) in enumerate(parts))
    given = capped(StepPlan(as_lengths([n for n, _ in parts]), micro_batches, limits(1, 4, ranks=2)), 0.3)
    room = given.limits.max_activation_bytes
    found = check(plan_of_plugin(given, context(1, 2), PipelineConfig(activation_gib=room / GIB)))
    assert any(map(any, found.recompute))
    assert held(found) <= room
