"""Cut sequences, orders, replays and groups of their own in the backward, against plain training of whole sequences."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

pytestmark = pytest.mark.slow

_spec = importlib.util.spec_from_file_location("random_plans", Path(__file__).with_name("random_plans.py"))
_plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_plans)

LENGTHS = (37, 5, 64, 2)
SEEDS = list(range(8))
CHAINS = {"pieces": [1, 16]}
CHAIN_SEEDS = [8, 11]
REPLAYS = ["none", "some", "all"]
TP2 = {"parallel__tp": 2, "model__num_layers": 2}
"""Two layers a stage, as in two stages of the model of four layers."""
LAYOUTS = [
    pytest.param(1, {"model__num_layers": 2}, id="one"),
    pytest.param(2, {"model__num_layers": 2}, id="dp2"),
    pytest.param(2, TP2, id="tp2"),
    pytest.param(2, {"parallel__pp": 2}, id="pp2"),
    pytest.param(4, {"parallel__pp": 4}, id="pp4"),
    pytest.param(4, {"parallel__pp": 2}, id="dp2pp2"),
    pytest.param(4, {"parallel__tp": 2, "parallel__pp": 2}, id="tp2pp2"),
]


def _exact(results, layout, lengths=LENGTHS):
    """All plans gave the reference, and the ranks ran every token's backward once."""
    copies = layout.get("parallel__tp", 1) * layout.get("parallel__pp", 1)
    for plans in zip(*results, strict=True):
        for found in plans:
            assert found["loss"] < 1e-12, found["plan"]
            assert found["grad"] < 1e-9, found["plan"]
            assert found["miscounted"] == 0
        ran = [(s.sequence, t) for found in plans for s in found["executed"] for t in range(s.start, s.stop)]
        assert sorted(ran) == sorted((i, t) for i, n in enumerate(lengths) for t in range(n) for _ in range(copies))


def test_the_random_plans_hold_what_they_are_to_prove():
    plans = [
        _plans.random_plan(seed, LENGTHS, num_ranks=ranks, num_stages=stages, layers_per_stage=4 // stages)
        for seed in SEEDS
        for ranks, stages in ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2))
    ]
    lengths = dict(enumerate(LENGTHS))

    def whole(plan):
        return {s.sequence for m in plan.micro_batches for s in m.slices if s.length == lengths[s.sequence]}

    wanted = {
        "sixteen slices": lambda p: Counter(s.sequence for m in p.micro_batches for s in m.slices)[2] == 16,
        "a pack of slices and whole sequences": lambda p: any(
            {s.sequence in p.cut for s in m.slices} == {True, False} for m in p.micro_batches
        ),
        "some kept, some replayed": lambda p: p.kept and p.replayed and not p.backward,
        "all replayed": lambda p: not p.kept,
        "groups of its own in backward": lambda p: p.backward,
        "some of them kept": lambda p: p.backward and p.kept,
        "whole in forward, cut in backward": lambda p: p.cut & whole(p),
        "recomputed layers": lambda p: any(map(any, p.recompute)),
    }
    for name, holds in wanted.items():
        assert any(holds(plan) for plan in plans), name


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["", "asymmetric"])
def test_the_drawn_chains_hold_sixteen_slices_beside_packed_sequences(asymmetric, replay):
    how = {"num_ranks": 1, "num_stages": 2, "layers_per_stage": 2, "asymmetric": asymmetric, "replay": replay}
    plan = _plans.random_plan(CHAIN_SEEDS[0], LENGTHS, **CHAINS, **how)
    assert 16 in Counter(s.sequence for m in plan.micro_batches for s in m.slices).values()
    assert any(len(m.slices) > 1 and {s.sequence for s in m.slices} - plan.cut for m in plan.micro_batches)


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_random_plans_give_the_gradients_of_plain_training(on_ranks, size, layout):
    _exact(on_ranks(size, "sliced", seeds=SEEDS, **layout), layout)


@pytest.mark.parametrize(("size", "layout"), LAYOUTS[1:4])
def test_the_same_when_the_recipe_recomputes_every_layer(on_ranks, size, layout):
    results = on_ranks(size, "sliced", seeds=SEEDS[:4], train__recompute=True, drawn={"recompute": False}, **layout)
    _exact(results, layout)


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["", "asymmetric"])
def test_chains_of_sixteen_slices_beside_packed_sequences(on_ranks, asymmetric, replay):
    layout = {"parallel__tp": 2, "parallel__pp": 2}
    drawn = {**CHAINS, "asymmetric": asymmetric, "replay": replay}
    _exact(on_ranks(4, "sliced", seeds=CHAIN_SEEDS, drawn=drawn, **layout), layout)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6).filter(lambda n: max(n) > 1), seed=st.integers(0))
def test_any_lengths(on_ranks, lengths, seed):
    results = on_ranks(1, "sliced", seeds=[seed, seed + 1], lengths=lengths, model__num_layers=2)
    _exact(results, {}, lengths)


@pytest.mark.parametrize("family", ["gpt", "qwen2", "qwen3"])
def test_every_family(on_ranks, family):
    layout = {"parallel__pp": 2}
    _exact(on_ranks(2, "sliced", seeds=[1, 2], model__family=family, **layout), layout)


def test_every_head_with_keys_of_its_own(on_ranks):
    _exact(on_ranks(2, "sliced", seeds=[1, 2], model__num_query_groups=4, **TP2), TP2)


def test_padded_slices(on_ranks):
    _exact(on_ranks(2, "sliced", seeds=SEEDS[:4], drawn={"pad": True}, parallel__pp=2), {"parallel__pp": 2})


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(("size", "layout"), [(2, {}), (4, {"parallel__pp": 2})], ids=["dp2", "dp2pp2"])
def test_a_rank_without_work(on_ranks, size, layout, overlap):
    drawn = {"idle": [1]}
    _exact(on_ranks(size, "sliced", seeds=[1, 2], drawn=drawn, megatron__overlap_grad_reduce=overlap, **layout), layout)


@pytest.mark.parametrize(("size", "layout"), [(2, {}), (4, {"parallel__pp": 2})], ids=["dp2", "dp2pp2"])
def test_overlapped_reduction_between_steps_of_either_schedule(on_ranks, size, layout):
    for errors in on_ranks(size, "reduced", seeds=[1, 2, 3], megatron__overlap_grad_reduce=True, **layout):
        assert max(errors) < 1e-9


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 2e-6), ("bf16", 0.03)])
@pytest.mark.parametrize("layout", [TP2, {"parallel__pp": 2}], ids=["tp2", "pp2"])
def test_training_dtypes_are_right_to_their_rounding(on_ranks, dtype, bound, layout):
    for plans in on_ranks(2, "sliced", seeds=SEEDS[:4], train__dtype=dtype, **layout):
        assert max(found["grad"] for found in plans) < bound


@pytest.mark.parametrize("layout", [{}, {"parallel__pp": 2}], ids=["dp2", "pp2"])
def test_slices_train_as_whole_sequences_do(on_ranks, layout):
    whole = on_ranks(2, "trained", cut=False, record=True, **layout)
    recorded = on_ranks(2, "trained", cut=True, record=True, **layout)
    refuse_wrong_spans([*whole, *recorded])
    if layout:
        plain = on_ranks(2, "trained", cut=True, **layout)
        for name in ("losses", "norms", "weights"):
            assert [rank[name] for rank in recorded] == [rank[name] for rank in plain], "recording changed a number"
        assert all(not spans for rank in plain for spans in rank["spans"])
    for mine, stock in zip(recorded, whole, strict=True):
        assert mine["losses"] == pytest.approx(stock["losses"], rel=1e-9)
        assert mine["norms"] == pytest.approx(stock["norms"], rel=1e-9)
        assert mine["weights"] == pytest.approx(stock["weights"], rel=1e-6)


def refuse_wrong_spans(ranks):
    """Every pass of the plan has its span, one after the other, then the gradient sum and the update."""
    kinds = {span.kind for rank in ranks for spans in rank["spans"] for span in spans}
    assert kinds == set("FRBGU")
    for spans, passes in ((s, p) for rank in ranks for s, p in zip(rank["spans"], rank["passes"], strict=True)):
        assert [(s.kind, s.micro_batch) for s in spans] == [*passes, ("G", -1), ("U", -1)]
        times = [t for s in spans for t in (s.start_s, s.end_s)]
        assert times == sorted(times)
        assert times[0] >= 0


MUTANTS = [
    ("dropped accumulator", {"asymmetric": False, "replay": "none"}),
    ("restarted positions", {"asymmetric": False}),
    ("loss booked twice", {"replay": "all"}),
    ("shifted tape", {"replay": "all"}),
    ("replay without grad", {"replay": "all"}),
]


@pytest.mark.parametrize(("mutant", "drawn"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_the_proof_catches_planted_faults(on_ranks, mutant, drawn):
    stages = 2 if mutant == "shifted tape" else 1
    drawn = {**CHAINS, **drawn}
    results = on_ranks(stages, "sliced", seeds=CHAIN_SEEDS, drawn=drawn, mutant=mutant, parallel__pp=stages)
    for plans in zip(*results, strict=True):
        caught = [found.get("error") or found["grad"] > 1e-4 or found["loss"] > 1e-4 for found in plans]
        assert any(caught)


def test_a_replay_runs_the_head_once_and_a_useless_forward_not_at_all(on_ranks):
    (kept,) = on_ranks(1, "counted", drawn={"asymmetric": False, "replay": "none", "recompute": False})
    assert kept["attention"] == kept["graphs"] == 4 * kept["forwards"]
    assert kept["head"] == kept["forwards"]
    drawn = {"asymmetric": False, "replay": "all", "recompute": False, "pieces": [1, 1, 2]}
    (replayed,) = on_ranks(1, "counted", drawn=drawn)
    assert 0 < replayed["prefixes"] < replayed["forwards"]
    assert replayed["attention"] == 4 * (replayed["prefixes"] + replayed["backwards"])
    assert replayed["graphs"] == 4 * replayed["backwards"]
    assert replayed["head"] == replayed["backwards"]
    (whole,) = on_ranks(1, "counted", drawn={**drawn, "pieces": [1]})
    assert whole["attention"] == 4 * whole["backwards"]
    assert whole["forward_s"] == 0 < replayed["forward_s"]


def test_the_plan_says_which_layers_are_recomputed_and_otherwise_the_recipe(on_ranks):
    drawn = {"asymmetric": False, "replay": "none"}
    options = {"parallel__pp": 2, "train__recompute": True}
    for stage, found in enumerate(on_ranks(2, "counted", drawn={**drawn, "recompute": True}, **options)):
        assert found["attention"] == 2 * found["forwards"] + found["recomputed"][stage]
        assert 0 < found["recomputed"][stage] < 2 * found["forwards"]
    for found in on_ranks(2, "counted", drawn={**drawn, "recompute": False}, **options):
        assert found["attention"] == 2 * 2 * found["forwards"]
    drawn = {"asymmetric": False, "replay": "all", "recompute": False}
    stages = on_ranks(2, "counted", drawn=drawn, **options)
    for found, first in zip(stages, (stages[0]["forwards"], stages[1]["prefixes"]), strict=True):
        assert found["attention"] == 2 * (first + found["backwards"])


def test_what_was_sent_is_freed_as_soon_as_the_plan_tells_that_it_arrived(on_ranks):
    first, second = on_ranks(2, "in_flight", packs=12)
    assert first == {"sent": 12, "most": 2}
    assert second == {"sent": 12, "most": 2}


def test_a_rank_that_fails_between_two_passes_ends_the_job_with_one_message(forge, tmp_path):
    job = Path(__file__).with_name("failing_job.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    ranks = [
        forge("megatron").start(job, tmp_path / "store", rank, environment={**env, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [1, 1]
    outputs = [rank.output for rank in ranks]
    assert [text.count("evenload: ") for text in outputs] == [0, 1]
    assert "failed in 'forward of micro-batch" in outputs[1]
    assert "ValueError: bad sample" in outputs[1]
