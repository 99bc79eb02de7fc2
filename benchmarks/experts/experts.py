"""What running in rounds costs plans of ranks that share experts, predicted.

    python benchmarks/experts/experts.py [--steps 4] [--json] [--out FILE]

The model of recipes/gpu-node.yaml, dense and with 8 experts of 4096 of which a token meets two: as many FLOPs a token.
Costs are counted FLOPs at the rate of the recipe's cluster (H200, one node), lengths log-normal (median 2,000 tokens,
shape 1.2, up to 16K), the same for every row. With EP 1 every rank has all experts and nobody waits for anybody inside
a pass; with EP n the n ranks of a group run every pass together. The price of rounds is the step over that of EP 1 if
nothing moved between ranks: of waiting for the longest pack of a round and of dummies alone. Routing is even, so what
uneven experts cost comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from evenload.api import load_recipe
from evenload.benchmarks.frame import columns, main, options
from evenload.core.costs.context import NO_TRAFFIC
from evenload.core.plan.step_plan import Lengths, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.simulate.step import simulate

SEQUENCES = 128
LONGEST = 16384
MOE = ["model.family=mixtral", "model.moe={num_experts: 8, topk: 2, ffn_hidden_size: 4096}"]
OFF = "plugins.packing.enabled=false"
PLUGINS = {
    "packing": ["parallel.dp=8", "plugins.packing.max_tokens=16384"],
    "mesh": ["parallel.dp=8", OFF, "plugins.mesh={enabled: true, max_tokens: 16384}"],
    "pipeline": ["parallel.dp=4", "parallel.pp=2", OFF, "plugins.pipeline={enabled: true, max_tokens: 16384}"],
}
MODELS = {"dense": [], "experts, EP 1": MOE, **{f"experts, EP {n}": [*MOE, f"parallel.ep={n}"] for n in (2, 4, 8)}}


def batches(steps: int) -> list[Lengths]:
    drawn = np.random.default_rng(16).lognormal(np.log(2000), 1.2, (steps, SEQUENCES))
    return [as_lengths(row) for row in drawn.astype(int).clip(16, LONGEST)]


def rows_of(plugin: str, steps: int) -> Iterator[dict[str, Any]]:
    """A row a model; means over the batches."""
    alone = dict.fromkeys(("step_s", "compute_s"), 0.0)
    for model, words in MODELS.items():
        recipe = load_recipe(RECIPES / "gpu-node.yaml", [*PLUGINS[plugin], *words, "planner.budget_ms=100000"])
        if recipe.parallel.ep > (recipe.parallel.dp or 1):
            continue
        chain = PlanChain.of_recipe(recipe, recipe.layout())
        plans = [chain.plan(batch) for batch in batches(steps)]
        done = [simulate(plan, chain.context, record=False) for plan in plans]
        still = replace(chain.context, traffic=NO_TRAFFIC)
        compute_s = float(np.mean([simulate(plan, still, record=False).step_s for plan in plans]))
        taken = {"step_s": float(np.mean([s.step_s for s in done])), "compute_s": compute_s}
        alone = taken if model == "experts, EP 1" else alone
        over = {name: one / alone[name] if alone[name] else None for name, one in taken.items()}
        yield {
            "plugin": plugin,
            "model": model,
            "step_s": taken["step_s"],
            "over_ep_1": over["step_s"],
            "price_of_rounds": over["compute_s"],
            "imbalance": float(np.mean([s.imbalance for s in done])),
            "bubble_frac": float(np.mean([s.bubble_frac for s in done])),
            "exposed_frac": float(np.mean([s.exposed_frac for s in done])),
            "peak_bytes": max(float(s.peak_bytes.max()) for s in done),
            "planners": sorted({plan.made_by for plan in plans}),
        }


def table(result: dict[str, Any]) -> Any:
    cells = {
        "": "{plugin}, {model}",
        "step": "{step_s:seconds}",
        "over EP 1": lambda row: f"{row['over_ep_1']:.3f}x" if row["over_ep_1"] else "",
        "price of rounds": lambda row: f"{row['price_of_rounds']:.3f}x" if row["price_of_rounds"] else "",
        "imbalance": "{imbalance:.3f}",
        "bubble": "{bubble_frac:percent}",
        "exposed": "{exposed_frac:percent}",
    }
    about = f"predicted, means of {result['steps']} batches of {SEQUENCES} sequences; routing is even"
    return columns("the price of rounds", result["rows"], cells, about)


def benchmark(asked: Any) -> dict[str, Any]:
    return {"steps": asked.steps, "rows": [row for plugin in PLUGINS for row in rows_of(plugin, asked.steps)]}


if __name__ == "__main__":
    main(options(__doc__, steps=4), benchmark, table)
