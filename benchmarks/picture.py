"""The README's picture: one global batch on 8 ranks, as stock, in-order packing and evenload would run it (predicted).

python benchmarks/picture.py docs/evenload.png
"""

from __future__ import annotations

import sys
from dataclasses import replace

import matplotlib

matplotlib.use("Agg")
from evenload.api import load_recipe
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import RECIPES
from evenload.core.simulate.predict import predict
from evenload.data.samples.order import SampleOrder
from evenload.training.preflight import preflight
from matplotlib import pyplot as plt

PLANNERS = {"stock: equal counts, padded": "stock", "packed in order": "in_order", "evenload": ""}
NUM_RANKS, NUM_SAMPLES = 8, 64


def main(path: str) -> None:
    overrides = [f"parallel.dp={NUM_RANKS}", f"train.global_batch_size={NUM_SAMPLES}"]
    ready = preflight(load_recipe(RECIPES / "quickstart.yaml", overrides))
    drawn, _ = SampleOrder(len(ready.source.lengths), ready.recipe.train.seed).take(NUM_SAMPLES)
    batch = as_lengths(ready.source.lengths[drawn])
    figure, axes = plt.subplots(len(PLANNERS), 1, figsize=(9, 5.4), sharex=True)
    for axis, (title, name) in zip(axes, PLANNERS.items(), strict=True):
        plan = replace(ready.chain, instead=name).plan(batch)
        _draw(axis, plan, ready.chain, title)
    axes[-1].set_xlabel("predicted seconds of one step; each box is a sequence, its colour its length, grey is padding")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw(axis: plt.Axes, plan: StepPlan, chain: PlanChain, title: str) -> None:
    costs, colours = chain.context.costs, plt.get_cmap("viridis")
    longest = int(plan.lengths.max())
    step_s = predict(plan, costs).step_s
    for rank in range(plan.limits.num_ranks):
        at = 0.0
        for index in plan.of_rank(rank):
            micro_batch = plan.micro_batches[index]
            for piece in micro_batch.slices:
                width = float(costs.sequence_s([piece.length])[0])
                padded = float(costs.sequence_s([micro_batch.pad_to or piece.length])[0])
                axis.barh(rank, width, left=at, color=colours(piece.length / longest), edgecolor="white", linewidth=0.4)
                axis.barh(rank, padded - width, left=at + width, color="0.85")
                at += padded
            at += costs.launch_s
    axis.axvline(step_s, color="crimson", linewidth=1)
    axis.set_title(f"{title}: {step_s:.1f} s", loc="left", fontsize=10)
    axis.set_yticks(range(plan.limits.num_ranks), [f"rank {r}" for r in range(plan.limits.num_ranks)], fontsize=7)
    axis.invert_yaxis()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "evenload.png")
