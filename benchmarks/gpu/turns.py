"""Halves of micro-batches that take turns on two streams: seconds of a step with and without them.

    PYTHONSAFEPATH=1 torchrun --nproc-per-node 8 benchmarks/gpu/turns.py [--json] [--tokens 16384] [--layers 8] [--tiny]

All ranks are one tensor-parallel group, in bf16 through Megatron-Core, layers of a llama of hidden size 4,096. Each row
is one micro-batch of ``--tokens``, once at once and once as halves: two sequences, one half each (*whole*), and one
long sequence whose second half attends to the keys of the first (*cut*). Leave CUDA_DEVICE_MAX_CONNECTIONS out.

    measured     forward and backward, median of runs that alternate, by the wall
    predicted    what the planner says of the same plans with counted costs of this cluster (``--cluster``)
    grad norm    relative difference between both; halves change nothing but rounding
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.laws import check
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.recipe import Recipe, parse
from evenload.patches import bridge_cpu
from evenload.runtime.world.world import World, close_world, init_world
from evenload.training.profiling.memory import random_tokens
from evenload.training.verbs.profile import machine

RUNS = 5


def recipe_of(words: argparse.Namespace, ranks: int) -> Recipe:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 11008}
    if words.tiny:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128}
    return parse(
        {
            "model": {"num_layers": words.layers, "vocab_size": 256 if words.tiny else 32000, **sizes},
            "parallel": {"tp": ranks, "dp": 1},
            "train": {"dtype": "fp32" if words.tiny else "bf16", "global_batch_size": 2},
            "data": {"max_length": words.tokens},
            "cluster": words.cluster,
            "plugins": {"mesh": {"enabled": True, "max_tokens": words.tokens, "halves": "auto"}},
        }
    )


def plans_of(chain: PlanChain, tokens: int) -> dict[str, tuple[StepPlan, StepPlan]]:
    """By name the plan that runs all at once, and the one in halves."""
    order = ((Op("F", 0), Op("B", 0)),)
    middle = int(chain.context.costs.both.tokens_within(0, float(chain.context.costs.both.seconds(tokens)) / 2))
    rows = {
        "whole": ([tokens // 2] * 2, [Slice(0, 0, tokens // 2), Slice(1, 0, tokens // 2)]),
        "cut": ([tokens], [Slice(0, 0, middle), Slice(0, middle, tokens)]),
    }
    plans = {}
    for name, (lengths, halves) in rows.items():
        batch = as_lengths(lengths)
        at_once = MicroBatch(tuple(Slice(i, 0, n) for i, n in enumerate(lengths)), (0,))
        plans[name] = (
            check(StepPlan(batch, (at_once,), chain.limits, order)),
            check(StepPlan(batch, (MicroBatch(tuple(halves), (0,), first_half=1),), chain.limits, order)),
        )
    return plans


def row_of(name: str, plans: tuple[StepPlan, StepPlan], host: Any, chain: PlanChain) -> dict[str, Any]:
    tokens_of = random_tokens(host.recipe)
    norms = [host.train_step(plan, tokens_of, lr=0.0).grad_norm for plan in plans]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS):
        for plan, taken in zip(plans, times, strict=True):
            dist.barrier()
            began = time.perf_counter()
            host.train_step(plan, tokens_of, lr=0.0)
            if host.device.type == "cuda":
                torch.cuda.synchronize(host.device)
            taken.append(time.perf_counter() - began)
    at_once_s, halves_s = map(statistics.median, times)
    predicted = [outcome_of(plan, chain.context).passes_s for plan in plans]
    return {
        "name": name,
        "at_once_s": at_once_s,
        "halves_s": halves_s,
        "saved": 1 - halves_s / at_once_s,
        "predicted_saved": 1 - predicted[1] / predicted[0],
        "grad_norm_rel_diff": abs(norms[1] / norms[0] - 1),
    }


def benchmark(words: argparse.Namespace, world: World) -> dict[str, Any]:
    from evenload.integrations.megatron import open_host

    recipe = recipe_of(words, world.size)
    host = open_host(recipe, world)
    chain = PlanChain.of_recipe(recipe, recipe.layout(world.size))
    rows = [row_of(name, plans, host, chain) for name, plans in plans_of(chain, words.tokens).items()]
    host.close()
    about = {"device": machine(world.device), "torch": torch.__version__, "tp": world.size}
    return {**about, "layers": words.layers, "tokens": words.tokens, "cluster": words.cluster, "rows": rows}


def table(result: dict[str, Any]) -> Any:
    rows = [
        (
            row["name"],
            f"{row['at_once_s']:.4f}",
            f"{row['halves_s']:.4f}",
            f"{row['saved']:+.1%}",
            f"{row['predicted_saved']:+.1%}",
            f"{row['grad_norm_rel_diff']:.1e}",
        )
        for row in result["rows"]
    ]
    title = f"halves that take turns, TP {result['tp']} on {result['device']}: {result['tokens']} tokens"
    return grid(title, ("half", "at once, s", "in turns, s", "saved", "predicted", "grad norm"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--tiny", action="store_true", help="A model that a CPU runs.")
    words = parser.parse_args()
    if not (torch.cuda.is_available() or words.tiny):
        raise SystemExit("there is no CUDA device here; --tiny --tokens 512 tries the script out on a CPU")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch)\.")
    load_plugins()
    bridge_cpu()
    world = init_world()
    result, leads = benchmark(words, world), world.rank == 0
    close_world(world)
    if leads:
        emit(result, words.json, table)


if __name__ == "__main__":
    main()
