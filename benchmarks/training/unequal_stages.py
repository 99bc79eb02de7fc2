"""Numbers of layers by stage, side by side: training steps and CPU seconds of every stage, the numbers in turn.

    python benchmarks/training/unequal_stages.py [--layers 6] [--hidden 128] [--vocabulary 4096] [--samples 8]
                                                 [--rounds 2] [--steps 2] [--costs FILE] [--json] [--out FILE]

A Llama of these sizes in two stages (Megatron-Core, float32, a CPU core each), whose output layer is the work of one or
two layers; samples of 64 to 512 tokens, `plugins.pipeline` on. Equal numbers and those of ``auto`` run in turn in each
round, the same batches.

    step            whole training steps, wall seconds: the least of each over all rounds, the mean of the steps. They
                    mean something where nothing else runs on the cores
    stages          CPU seconds of each stage in the passes of a step, likewise; other work does not change them
    bubble          of both stages, 1 - mean CPU seconds / step: the update and what is sent count as idle
    idle            while the busier one works, 1 - mean / most: no bubble is less
    predicted       step and bubble of the simulator, by the costs that are given
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from evenload.benchmarks.chains import plugins, recipe_of
from evenload.benchmarks.frame import Row, main, options, started
from evenload.commands.tables.show import grid

STAGES = 2


def staged(asked: argparse.Namespace, layers: Any) -> Any:
    sizes = {"num_layers": asked.layers, "hidden_size": asked.hidden, "vocab_size": asked.vocabulary}
    return recipe_of(
        {
            "model": {**sizes, "num_attention_heads": 4, "num_query_groups": 4},
            "data": {"max_length": 512},
            "parallel": {"pp": STAGES, "layers": layers},
            "train": {"global_batch_size": asked.samples, "seed": 1234},
            "costs": asked.costs,
            "plugins": plugins(512, "pipeline"),
        }
    )


def on_rank(asked: argparse.Namespace) -> None:
    """Both numbers in every round; rank 0 prints what came of it."""
    from evenload.core.planning.stage_layers import settled
    from evenload.patches import bridge_cpu
    from evenload.runtime.world.world import close_world, init_world

    bridge_cpu()
    world = init_world()
    lengths = np.random.default_rng(1).integers(64, 513, (asked.steps, asked.samples))
    auto = list(settled(staged(asked, "auto"), STAGES, lengths[0]).parallel.layers)
    rows: dict[str, Row] = {}
    for layers in [[asked.layers // STAGES] * STAGES, auto] * asked.rounds:
        row = _steps(staged(asked, layers), world, lengths, asked.vocabulary)
        known = rows.setdefault(str(layers), {**row, "layers": layers, "auto": layers == auto})
        for key in ("stages_s", "steps_s"):
            known[key] = np.minimum(known[key], row[key]).tolist()
    close_world(world)
    if world.rank == 0:
        print(json.dumps({"rows": list(rows.values()), "settings": {**vars(asked), "out": None}}))


def _steps(recipe: Any, world: Any, lengths: Any, vocabulary: int) -> Row:
    """Wall seconds of each step, CPU seconds of each stage in its passes, and what the simulator says of them."""
    import torch
    import torch.distributed as dist
    from evenload.core.planning.chain import PlanChain
    from evenload.core.planning.judge import outcome_of
    from evenload.integrations.megatron import open_host

    host = open_host(recipe, world)
    chain = PlanChain.of_recipe(recipe, recipe.layout(world.size))
    busy, steps_s, outcomes = torch.zeros(len(lengths), world.size, dtype=torch.float64), [], []
    for number, batch in enumerate(lengths):
        plan = chain.plan(batch)
        outcomes.append(outcome_of(plan, chain.context))
        generator = np.random.default_rng(len(outcomes))
        samples = [generator.integers(0, vocabulary, n) for n in batch]
        dist.barrier()
        begun_s = time.perf_counter()
        busy[number, host.pipeline_stage] = host.train_step(plan, samples.__getitem__, lr=1e-3).busy_s
        dist.barrier()
        steps_s.append(time.perf_counter() - begun_s)
    dist.all_reduce(busy)
    host.close()
    return {
        "stages_s": busy.tolist(),
        "steps_s": steps_s,
        "predicted_s": float(np.mean([one.step_s for one in outcomes])),
        "predicted_bubble_frac": float(np.mean([one.bubble_frac for one in outcomes])),
    }


def benchmark(asked: argparse.Namespace) -> Row:
    return started(__file__, STAGES)


def table(result: Row) -> Any:
    """A row for each division."""
    first = result["rows"][0]
    head = ["layers", "step s", "over equal", "bubble", "CPU s of stages", "idle", "over equal, predicted", "bubble"]
    return grid("numbers of layers by stage", head, [_cells(row, first) for row in result["rows"]])


def _cells(row: Row, equal: Row) -> list[str]:
    step_s, equal_s = float(np.mean(row["steps_s"])), float(np.mean(equal["steps_s"]))
    stages_s = np.mean(row["stages_s"], axis=0)
    return [
        " | ".join(map(str, row["layers"])) + " (auto)" * row["auto"],
        f"{step_s:.2f}",
        f"{step_s / equal_s:.3f}",
        f"{1 - stages_s.mean() / step_s:.1%}",
        " | ".join(f"{seconds:.2f}" for seconds in stages_s),
        f"{1 - stages_s.mean() / stages_s.max():.1%}",
        f"{row['predicted_s'] / equal['predicted_s']:.3f}",
        f"{row['predicted_bubble_frac']:.1%}",
    ]


if __name__ == "__main__":
    sizes = {"layers": 6, "hidden": 128, "vocabulary": 4096, "samples": 8, "rounds": 2, "steps": 2}
    main(options(__doc__, **sizes, costs="auto"), benchmark, table, on_rank)
