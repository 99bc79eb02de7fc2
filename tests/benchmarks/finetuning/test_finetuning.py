"""Benchmarks of fine-tuning: weights that ranks read, and planned validation next to padded batches."""

from __future__ import annotations

import json

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.finetuning import pretrained, validation
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.forward_only import forward_only
from evenload.core.recipe.recipe import load


def test_the_table_sets_a_peak_beside_the_share_of_its_rank(shown):
    ranks = [
        {"share_bytes": 100 << 20, "more_bytes": n << 20, "largest_bytes": 40 << 20, "seconds": 1.5} for n in (30, 55)
    ]
    text = shown(pretrained.table({"layout": "ZeRO 0", "ranks": ranks, "from_pretrained_s": 0.5}))
    assert all(word in text for word in ("1.30", "1.55", "500 ms"))


FORKED = """
import torch.multiprocessing as mp
mp.spawn = lambda function, arguments, ranks: mp.start_processes(function, arguments, ranks, start_method="fork")
"""


def test_every_rank_says_what_it_keeps(ran):
    done = ran(
        "finetuning/pretrained.py", "--quick", "--layout", "zero3", "--json", trainer="deepspeed", planted=FORKED
    )
    ranks = json.loads(done.stdout)["ranks"]
    assert len(ranks) == 2
    # An embedding and an output layer of 512 x 64, two layers of four projections and an MLP, five norms.
    whole_bytes = 4 * (2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128) + 5 * 64)
    for row in ranks:
        assert whole_bytes / 2 <= row["share_bytes"] < 1.05 * whole_bytes / 2
        assert row["more_bytes"] > 0


def test_padded_batches_of_sorted_samples_hold_the_same_tokens_with_less_padding():
    load_plugins()
    recipe = load("recipes/quickstart.yaml", ["model.vocab_size=256"])
    lengths = as_lengths(np.random.default_rng(2).integers(2, 4000, 32))
    plans = validation.plans_of(forward_only(PlanChain.of_recipe(recipe, recipe.layout())), lengths)
    padding = [plans[name].padding_frac for name in ("padded", "sorted", "evenload")]
    assert padding[0] > padding[1] > padding[2] == 0.0
    for plan in plans.values():
        assert sorted(s.sequence for m in plan.micro_batches for s in m.slices) == list(range(32))
    assert all(len(m.slices) == validation.SAMPLES for m in plans["sorted"].micro_batches)


def test_the_table_compares_every_variant_with_evenload(shown):
    rows = [
        {"batch": b, "variant": name, "seconds": s, "tokens": 100, "computed": n, "apart": 0.0}
        for b in range(1, 8)
        for name, s, n in (("padded", 3.0, 200), ("evenload", 1.5, 100))
    ]
    result = {"variants": validation.summary(rows), "host": {"trainer": "megatron", "device": "cpu"}}
    padded, own = (line for line in shown(validation.table(result)).splitlines() if "0e+00" in line)
    assert "2.00x" in padded
    assert "50 %" in padded
    assert "2.00x" not in own
