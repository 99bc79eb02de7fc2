"""Micro-batches that ranks share, on any ranks and by every cp_comm, against plain training of whole sequences."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from harness.cases import only_full
from harness.proof import LENGTHS, caught, random_shared_plan
from hypothesis import HealthCheck, given, settings
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

DRAWN = ["shared 1", "shared 17"]
MORE = [f"shared {seed}" for seed in range(6)]
TWO = {"model__num_layers": 2}
PP2 = {"parallel__pp": 2}
TP2 = {"parallel__tp": 2}
MIXED = ["ring", "all_gather", "all_to_all", "hybrid"]
BY_HAND = [*MIXED, "zones", "zones, remap", "chain", "growth"]
PAIRS = ["pairs", "pairs, all_to_all", "together"]
APART = ["pairs, weights apart", "pairs, all_to_all, weights apart"]


def test_the_random_plans_hold_what_they_are_to_prove():
    sizes = {"num_ranks": 4, "num_stages": 1, "layers_per_stage": 2, "heads": 4}
    plans = [random_shared_plan(int(name.split()[1]), LENGTHS, **sizes) for name in DRAWN]
    assert plans[0].digest == random_shared_plan(1, LENGTHS, **sizes).digest

    def some(holds):
        return lambda plan: any(len(m.ranks) > 1 and holds(m) for m in plan.micro_batches)

    def grows(plan):
        cp_groups = {}
        for m in plan.micro_batches:
            for s, cp_group in zip(m.slices, m.ranks_of_slices, strict=True):
                cp_groups.setdefault(s.sequence, set()).add(frozenset(cp_group))
        return any(len(found) > 1 for found in cp_groups.values())

    wanted = {
        **{cp_comm: some(lambda m, cp_comm=cp_comm: m.cp_comm == cp_comm) for cp_comm in MIXED},
        "three ranks of four": some(lambda m: len(m.ranks) == 3),
        "homes of several sizes": some(lambda m: len(set(map(len, m.cp_groups))) > 1),
        "a short sequence beside a long one": some(lambda m: 1 in map(len, m.cp_groups)),
        "a remap": some(lambda m: m.remap),
        "a remap to ranks that are nobody's home": some(
            lambda m: m.cp_groups and set(m.ranks) > set(sum(m.cp_groups, ()))
        ),
        "routed": some(lambda m: m.routed),
        "a CP group that grows": grows,
        "some kept, some replayed": lambda p: p.kept and p.replayed and not p.backward,
        "recomputed layers": lambda p: any(map(any, p.recompute)),
        "groups of their own in backward beside shared ones": lambda p: p.backward and p.shared and p.cut,
    }
    assert [name for name, holds in wanted.items() if not any(holds(plan) for plan in plans)] == []


@pytest.mark.parametrize(
    ("layout", "plans"),
    [
        pytest.param({}, [*BY_HAND, *DRAWN], id="plane4"),
        pytest.param(TP2, ["pairs", "together", DRAWN[0]], id="tp2"),
        pytest.param(PP2, ["pairs, all_to_all", APART[0], DRAWN[0]], id="pp2"),
        only_full({}, MORE, id="plane4, more"),
        only_full(TP2, [*PAIRS, *APART, *MORE[:4]], id="tp2, all"),
        only_full(PP2, [*PAIRS, *APART, *MORE], id="pp2, all"),
    ],
)
def test_shared_micro_batches_give_the_gradients_of_plain_training(on_ranks, layout, plans):
    exact(on_ranks(4, "proven", plans=plans, **TWO, **layout), layout)


@pytest.mark.parametrize("layout", [only_full({}, id="plane4"), only_full(TP2, id="tp2"), only_full(PP2, id="pp2")])
def test_weights_that_add_up_to_0_train_by_their_divisor(on_ranks, layout):
    exact(on_ranks(4, "proven", plans=["pairs", "together", DRAWN[0]], drawings=20, **TWO, **layout), layout)


def test_the_same_when_the_recipe_recomputes_every_layer(on_ranks):
    exact(on_ranks(4, "proven", plans=["hybrid", "growth"], train__recompute=True, **TWO), {})


def test_every_head_with_keys_of_its_own(on_ranks):
    exact(on_ranks(4, "proven", plans=["all_to_all", "hybrid"], model__num_query_groups=4, **TWO), {})


@settings(
    max_examples=max(2, settings.default.max_examples // 25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6).filter(lambda n: max(n) > 1),
    seed=st.integers(0, 1 << 30),
)
def test_any_lengths_and_plans(on_ranks, lengths, seed):
    results = on_ranks(4, "proven", plans=[f"shared {seed}", f"shared {seed + 1}"], lengths=lengths, **TWO)
    exact(results, {}, lengths)


@pytest.mark.parametrize("layout", [only_full({}, id="plane4"), pytest.param(PP2, id="pp2")])
def test_overlapped_reduction_between_steps_with_and_without_sharing(on_ranks, layout):
    plans = PAIRS if layout else ["ring", "chain"]
    by_turns = [one for which in plans for one in (which, None)]
    for errors in on_ranks(4, "summed_gradients", plans=by_turns, megatron__overlap_grad_reduce=True, **TWO, **layout):
        assert max(errors) < 1e-9


def test_the_distributed_optimizer_trains_shared_plans_as_whole_sequences(on_ranks):
    options = {
        "train__dtype": "fp32",
        **TWO,
        "megatron__distributed_optimizer": True,
        "megatron__overlap_grad_reduce": True,
    }
    alone = on_ranks(4, "train", **options)[0]
    for result in on_ranks(4, "train", plans=["zones, remap", "growth", "hybrid"], **options):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert result["weights"] == pytest.approx(alone["weights"], rel=1e-4)


def test_a_loop_of_ones_own_shares_over_the_open_plane(on_ranks):
    assert max(on_ranks(4, "own_loop", shared=True)) < 2e-6


def test_what_no_host_here_can_run_is_refused(on_ranks):
    for no_engine, stages in on_ranks(4, "refused"):
        assert "no cp_comm" in no_engine
        assert "plugins.mesh" in no_engine
        assert "pipeline stages" in stages


MUTANTS = {
    "positions of pieces": ["ring"],
    "labels at borders": ["zones"],
    "dropped accumulator": ["chain"],
    "lost in forward": ["ring"],
    "lost in backward": ["all_gather"],
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proof_catches_planted_faults(on_ranks, mutant):
    results = on_ranks(4, "proven", plans=MUTANTS[mutant], mutant=mutant, **TWO)
    assert caught(results)
