"""Numbers of layers by stage, beside each other: CPU seconds of every stage in training steps, the numbers in turn.

    python benchmarks/training/unequal_stages.py [--layers 6] [--hidden 128] [--vocabulary 4096] [--samples 8]
                                                 [--rounds 2] [--steps 2] [--costs FILE] [--json] [--out FILE]

A Llama of these sizes in two stages (Megatron-Core, float32, a CPU core each), whose output layer is the work of one or
two layers; samples of 64 to 512 tokens, `plugins.pipeline` on. Equal numbers and those of ``auto`` run in turn in each
round, the same batches.

    stages          the least CPU seconds of each stage in the passes of a step, over all rounds (mean of the steps)
    step            no shorter than its busiest stage: that, over equal numbers'
    idle            of both stages, while the busier one works: 1 - mean / most; a bubble is that at the least
    step, bubble    of the simulator, by the costs that are given
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from evenload.commands.tables.show import grid

sys.path.append(str(Path(__file__).parents[1]))
import on_ranks

STAGES = 2
Row = dict[str, Any]


def recipe_of(asked: argparse.Namespace, layers: Any) -> Any:
    from evenload.api import load_plugins
    from evenload.core.recipe.recipe import parse

    load_plugins()
    model = {"num_layers": asked.layers, "hidden_size": asked.hidden, "vocab_size": asked.vocabulary}
    return parse(
        {
            "model": {**model, "num_attention_heads": 4, "num_query_groups": 4},
            "data": {"max_length": 512},
            "parallel": {"pp": STAGES, "layers": layers},
            "train": {"global_batch_size": asked.samples, "seed": 1234},
            "costs": asked.costs,
            "plugins": {"pipeline": {"enabled": True, "max_tokens": 512}},
        }
    )


def on_rank(asked: argparse.Namespace) -> None:
    """Both numbers in every round; rank 0 prints what came of it."""
    from evenload.core.search.stage_layers import settled
    from evenload.patches import bridge_cpu
    from evenload.runtime.world.world import close_world, init_world

    bridge_cpu()
    world = init_world()
    lengths = np.random.default_rng(1).integers(64, 513, (asked.steps, asked.samples))
    auto = list(settled(recipe_of(asked, "auto"), STAGES, lengths[0]).parallel.layers)
    rows: dict[str, Row] = {}
    for layers in [[asked.layers // STAGES] * STAGES, auto] * asked.rounds:
        row = _steps(recipe_of(asked, layers), world, lengths, asked.vocabulary)
        known = rows.setdefault(str(layers), {**row, "layers": layers, "auto": layers == auto})
        known["stages_s"] = np.minimum(known["stages_s"], row["stages_s"]).tolist()
    close_world(world)
    if world.rank == 0:
        print(json.dumps({"rows": list(rows.values()), "settings": {**vars(asked), "out": None}}))


def _steps(recipe: Any, world: Any, lengths: Any, vocabulary: int) -> Row:
    """Mean CPU seconds of each stage in the passes of a step, and what the simulator says of the steps."""
    import torch
    import torch.distributed as dist
    from evenload.core.planning.chain import PlanChain
    from evenload.core.planning.judge import outcome_of
    from evenload.integrations.megatron import open_host

    host = open_host(recipe, world)
    chain = PlanChain.of_recipe(recipe, recipe.layout(world.size))
    busy, outcomes = torch.zeros(world.size, dtype=torch.float64), []
    for batch in lengths:
        plan = chain.plan(batch)
        outcomes.append(outcome_of(plan, chain.context))
        generator = np.random.default_rng(len(outcomes))
        samples = [generator.integers(0, vocabulary, n) for n in batch]
        busy[host.pipeline_stage] += host.train_step(plan, samples.__getitem__, lr=1e-3).busy_s / len(lengths)
    dist.all_reduce(busy)
    host.close()
    return {
        "stages_s": busy.tolist(),
        "predicted_s": float(np.mean([one.step_s for one in outcomes])),
        "predicted_bubble_frac": float(np.mean([one.bubble_frac for one in outcomes])),
    }


def benchmark(asked: argparse.Namespace) -> Row:
    return on_ranks.result_of(on_ranks.begun(__file__, sys.argv[1:], STAGES))


def table(result: Row) -> Any:
    """A row for each division."""
    rows = result["rows"]
    equal = max(rows[0]["stages_s"])
    cells = [
        [
            " | ".join(map(str, row["layers"])) + " (auto)" * row["auto"],
            " | ".join(f"{seconds:.2f}" for seconds in row["stages_s"]),
            f"{max(row['stages_s']) / equal:.3f}",
            f"{1 - np.mean(row['stages_s']) / max(row['stages_s']):.1%}",
            f"{row['predicted_s'] / rows[0]['predicted_s']:.3f}",
            f"{row['predicted_bubble_frac']:.1%}",
        ]
        for row in rows
    ]
    head = [
        "layers",
        "CPU s of stages",
        "busiest over equal",
        "idle",
        "step over equal, predicted",
        "bubble, predicted",
    ]
    return grid("numbers of layers by stage", head, cells)


if __name__ == "__main__":
    arguments = on_ranks.parser(__doc__)
    sizes = {"layers": 6, "hidden": 128, "vocabulary": 4096, "samples": 8, "rounds": 2, "steps": 2}
    for name, value in sizes.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    arguments.add_argument("--costs", default="auto")
    on_ranks.main(arguments, on_rank, benchmark, table)
