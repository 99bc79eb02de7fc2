"""Planned validation beside padded batches: lawful plans of the same samples, and the table of what a run says."""

from __future__ import annotations

import io

import numpy as np
from evenload.api import load_plugins
from evenload.benchmarks.finetuning import validation
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.forward_only import forward_only
from evenload.core.recipe.recipe import load
from rich.console import Console


def test_padded_batches_of_sorted_samples_hold_the_same_tokens_with_less_padding() -> None:
    load_plugins()
    recipe = load("recipes/quickstart.yaml", ["model.vocab_size=256"])
    lengths = as_lengths(np.random.default_rng(2).integers(2, 4000, 32))
    plans = validation.plans_of(forward_only(PlanChain.of_recipe(recipe, recipe.layout())), lengths)
    padding = [plans[name].padding_frac for name in ("padded", "sorted", "evenload")]
    assert padding[0] > padding[1] > padding[2] == 0.0
    for plan in plans.values():
        assert sorted(s.sequence for m in plan.micro_batches for s in m.slices) == list(range(32))
    assert all(len(m.slices) == validation.SAMPLES for m in plans["sorted"].micro_batches)


def test_the_table_compares_every_variant_with_evenload() -> None:
    rows = [
        {"batch": b, "variant": name, "seconds": s, "tokens": 100, "computed": n, "apart": 0.0}
        for b in range(1, 8)
        for name, s, n in (("padded", 3.0, 200), ("evenload", 1.5, 100))
    ]
    result = {"variants": validation.summary(rows), "host": {"trainer": "megatron", "device": "cpu"}}
    console = Console(file=io.StringIO(), width=160)
    console.print(validation.table(result))
    padded, own = (line for line in console.file.getvalue().splitlines() if "0e+00" in line)
    assert "2.00x" in padded
    assert "50 %" in padded
    assert "2.00x" not in own
