"""Cut sequences, orders, replays and groups of their own in the backward, against plain training of whole sequences."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import pytest
from harness.cases import only_full
from harness.proof import caught, random_plan
from hypothesis import HealthCheck, given, settings
from megatron_tests.exact import exact

pytestmark = pytest.mark.slow

LENGTHS = (37, 5, 64, 2)
SEEDS = list(range(8))
CHAINS = {"pieces": [1, 16]}
CHAIN_SEEDS = [8, 11]
KINDS = {
    f"{name}{replay}": {"asymmetric": bool(name), "replay": replay}
    for name in ("", "asymmetric-")
    for replay in ("none", "some", "all")
}
AT_EVERY_CHANGE = ("none", "asymmetric-some", "all")
"""Random plans of each layout hold the others, too."""
TWO = {"model__num_layers": 2}
"""Two layers a stage, as in two stages of the model of four layers."""
TP2 = {"parallel__tp": 2, **TWO}
PP2 = {"parallel__pp": 2}
TP2PP2 = {"parallel__tp": 2, "parallel__pp": 2}
LAYOUTS = {
    "one": (1, TWO, SEEDS),
    "dp2": (2, TWO, [0, 1, 3, 8]),
    "tp2": (2, TP2, [6, 2, 9, 4]),
    "pp2": (2, PP2, [1, 3, 4, 2]),
    "pp4": (4, {"parallel__pp": 4}, [6, 2]),
    "dp2pp2": (4, PP2, [2, 6]),
    "tp2pp2": (4, TP2PP2, [6, 2]),
}
"""Ranks, changes of the recipe, and seeds of plans."""
_exact = partial(exact, lengths=LENGTHS)


def _prove(on_ranks, size, layout, plans, **more):
    _exact(on_ranks(size, "proven", plans=plans, lengths=LENGTHS, **layout, **more), layout)


def test_the_random_plans_hold_what_they_are_to_prove():
    plans = []
    for size, layout, seeds in LAYOUTS.values():
        stages = layout.get("parallel__pp", 1)
        sizes = {"num_ranks": size // stages // layout.get("parallel__tp", 1), "num_stages": stages}
        sizes["layers_per_stage"] = layout.get("model__num_layers", 4) // stages
        plans += [random_plan(seed, LENGTHS, **sizes) for seed in seeds]
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
    assert [name for name, holds in wanted.items() if not any(map(holds, plans))] == []


def test_the_drawn_chains_hold_sixteen_slices_beside_packed_sequences():
    for kind in KINDS.values():
        plan = random_plan(CHAIN_SEEDS[0], LENGTHS, num_ranks=1, num_stages=2, layers_per_stage=2, **CHAINS, **kind)
        assert 16 in Counter(s.sequence for m in plan.micro_batches for s in m.slices).values()
        assert any(len(m.slices) > 1 and {s.sequence for s in m.slices} - plan.cut for m in plan.micro_batches)


@pytest.mark.parametrize(
    ("size", "layout", "seeds"),
    [
        *(pytest.param(*values, id=name) for name, values in LAYOUTS.items()),
        *(only_full(*values[:2], SEEDS, id=f"{name}, all") for name, values in LAYOUTS.items() if name != "one"),
    ],
)
def test_random_plans_give_the_gradients_of_plain_training(on_ranks, size, layout, seeds):
    _prove(on_ranks, size, layout, seeds)


@pytest.mark.parametrize(
    ("size", "layout", "drawings"),
    [
        pytest.param(2, TWO, 2, id="dp2"),
        *(only_full(*values[:2], 20, id=f"{name}, all") for name, values in LAYOUTS.items()),
    ],
)
def test_weights_that_add_up_to_0_train_by_their_divisor(on_ranks, size, layout, drawings):
    _prove(on_ranks, size, layout, [1, 8], drawings=drawings)


@pytest.mark.parametrize("layout", [only_full(TWO, id="dp2"), only_full(TP2, id="tp2"), pytest.param(PP2, id="pp2")])
def test_the_same_when_the_recipe_recomputes_every_layer(on_ranks, layout):
    _prove(on_ranks, 2, layout, SEEDS[:4], train__recompute=True, drawn={"recompute": False})


@pytest.mark.parametrize(
    ("size", "layout", "kind", "seeds"),
    [
        *(
            (pytest.param if name in AT_EVERY_CHANGE else only_full)(2, PP2, kind, CHAIN_SEEDS[:1], id=f"pp2-{name}")
            for name, kind in KINDS.items()
        ),
        *(only_full(4, TP2PP2, kind, CHAIN_SEEDS, id=f"tp2pp2-{name}") for name, kind in KINDS.items()),
    ],
)
def test_chains_of_sixteen_slices_beside_packed_sequences(on_ranks, size, layout, kind, seeds):
    _prove(on_ranks, size, layout, seeds, drawn={**CHAINS, **kind})


@settings(
    max_examples=settings.default.max_examples // 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6).filter(lambda n: max(n) > 1), seed=st.integers(0))
def test_any_lengths(on_ranks, lengths, seed):
    results = on_ranks(1, "proven", plans=[seed, seed + 1], lengths=lengths, **TWO)
    _exact(results, {}, lengths=lengths)


@pytest.mark.parametrize(
    ("layout", "seeds", "changes"),
    [
        pytest.param(PP2, [6], {"model__family": "qwen3"}, id="norms of queries and keys"),
        pytest.param(TP2, [2], {"model__num_query_groups": 4}, id="every head with keys of its own"),
        pytest.param(PP2, [2, 6], {"drawn": {"pad": True}}, id="padded slices"),
    ],
)
def test_other_models_and_padding(on_ranks, layout, seeds, changes):
    """The families gpt and qwen2, which have biases, are in test_pipeline.py."""
    _prove(on_ranks, 2, layout, seeds, **changes)


@pytest.mark.parametrize(
    ("size", "layout", "overlap"),
    [
        pytest.param(2, {}, True, id="dp2-overlap"),
        pytest.param(4, PP2, False, id="dp2pp2"),
        only_full(2, {}, False, id="dp2"),
        only_full(4, PP2, True, id="dp2pp2-overlap"),
    ],
)
def test_a_rank_without_work(on_ranks, size, layout, overlap):
    how = {"drawn": {"idle": [1]}, "megatron__overlap_grad_reduce": overlap}
    _prove(on_ranks, size, layout, [1, 2], **how)


@pytest.mark.parametrize(("size", "layout"), [pytest.param(2, {}, id="dp2"), only_full(4, PP2, id="dp2pp2")])
def test_overlapped_reduction_between_steps_of_either_schedule(on_ranks, size, layout):
    plans = [1, None, 2, None, 3, None]
    for errors in on_ranks(size, "summed_gradients", plans=plans, megatron__overlap_grad_reduce=True, **layout):
        assert max(errors) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "bound", "layout"),
    [
        pytest.param("fp32", 2e-6, PP2, id="fp32-pp2"),
        pytest.param("bf16", 0.03, TP2, id="bf16-tp2"),
        only_full("fp32", 2e-6, TP2, id="fp32-tp2"),
        only_full("bf16", 0.03, PP2, id="bf16-pp2"),
    ],
)
def test_training_dtypes_are_right_to_their_rounding(on_ranks, dtype, bound, layout):
    for plans in on_ranks(2, "proven", lengths=LENGTHS, plans=[2, 6], train__dtype=dtype, **layout):
        assert max(found["grad"] for found in plans) < bound


@pytest.mark.parametrize("layout", [only_full({}, id="dp2"), pytest.param(PP2, id="pp2")])
def test_slices_train_as_whole_sequences_do(on_ranks, layout):
    layout, cut = {**TWO, **layout}, [4, 5, 6]
    whole = on_ranks(2, "train", record=True, **layout)
    recorded = on_ranks(2, "train", plans=cut, record=True, **layout)
    refuse_wrong_spans([*whole, *recorded])
    if "parallel__pp" in layout:
        plain = on_ranks(2, "train", plans=cut, **layout)
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
    how = {"lengths": LENGTHS, "drawn": {**CHAINS, **drawn}, "mutant": mutant}
    how |= {"parallel__pp": stages, "model__num_layers": 2 * stages}
    assert caught(on_ranks(stages, "proven", plans=CHAIN_SEEDS, **how))


def test_a_replay_runs_the_head_once_and_a_useless_forward_not_at_all(on_ranks):
    stored = {"asymmetric": False, "replay": "none", "recompute": False}
    cut = {"asymmetric": False, "replay": "all", "recompute": False, "pieces": [1, 1, 2]}
    ((kept, replayed, whole),) = on_ranks(1, "counted", plans=[stored, cut, {**cut, "pieces": [1]}])
    assert kept["attention"] == kept["graphs"] == 4 * kept["forwards"]
    assert kept["head"] == kept["forwards"]
    assert 0 < replayed["prefixes"] < replayed["forwards"]
    assert replayed["attention"] == 4 * (replayed["prefixes"] + replayed["backwards"])
    assert replayed["graphs"] == 4 * replayed["backwards"]
    assert replayed["head"] == replayed["backwards"]
    assert whole["attention"] == 4 * whole["backwards"]
    assert whole["forward_s"] == 0 < replayed["forward_s"]


def test_the_plan_says_which_layers_are_recomputed_and_otherwise_the_recipe(on_ranks):
    kinds = [("none", True), ("none", False), ("all", False)]
    plans = [{"asymmetric": False, "replay": replay, "recompute": recompute} for replay, recompute in kinds]
    stages = on_ranks(2, "counted", plans=plans, train__recompute=True, **PP2)
    firsts = stages[0][2]["forwards"], stages[1][2]["prefixes"]
    for stage, (by_plan, by_recipe, replayed) in enumerate(stages):
        assert by_plan["attention"] == 2 * by_plan["forwards"] + by_plan["recomputed"][stage]
        assert 0 < by_plan["recomputed"][stage] < 2 * by_plan["forwards"]
        assert by_recipe["attention"] == 2 * 2 * by_recipe["forwards"]
        assert replayed["attention"] == 2 * (firsts[stage] + replayed["backwards"])


def test_a_rank_that_fails_between_two_passes_ends_the_job_with_one_message(forge, tmp_path):
    job = Path(__file__).with_name("failing_job.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    environments = [{**env, "RANK": rank} for rank in "01"]
    ranks = [forge("megatron").start(job, tmp_path / "store", e["RANK"], environment=e) for e in environments]
    assert [rank.wait() for rank in ranks] == [1, 1]
    outputs = [rank.output for rank in ranks]
    assert [text.count("evenload: ") for text in outputs] == [0, 1]
    assert "failed in 'forward of micro-batch" in outputs[1]
    assert "ValueError: bad sample" in outputs[1]
