"""The moe plugin against its baselines in real training, alternating in one run: measured.

    python benchmarks/experts/moe_run.py [--workload real] [--ranks 2] [--against static,eplb,ultraep,moonep] \\
        [key=value ...]
                                 [--json] [--out FILE]

Workloads: ``real`` is recipes/moe.yaml as it trains. W0 (balanced), W1 (hot experts) and W2 (hot rank) are those of
Megatron-LM's pull request 7488: routers choose experts by drawn popularity, a hot one 16 times as popular, the same in
every variant; what they give a token's experts stays differentiable. ``allowed`` is the baseline's critical path over
the same with even experts (`training.experts.critical_path`), what quotas alone can gain; on four ranks and two cores
the wall clock hides what ranks wait, so there the paths tell, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
import torch
from evenload.benchmarks.frame import interval, main, options, started
from evenload.commands.tables.show import grid

HEAT = 16
SETTINGS = ("plugins.moe.enabled=true", "train.steps=16")


def heat_of(workload: str, num_experts: int, ranks: int) -> Any:
    """Logarithm of how popular each expert is [experts]."""
    heat = np.ones(num_experts)
    if workload == "W1":
        heat[num_experts // 3] = HEAT
    elif workload == "W2":
        heat[: num_experts // ranks] = HEAT
    return torch.from_numpy(np.log(heat))


def force(workload: str, ranks: int) -> None:
    """Let the routers of this process choose by drawn popularity."""
    from evenload.patches import bridge_cpu

    bridge_cpu()
    from evenload.integrations.megatron.model.experts import PlannedRouter

    def choose(router: Any, logits: Any, scores: Any) -> tuple[Any, Any]:
        heat = heat_of(workload, scores.shape[1], ranks)
        draw = torch.Generator().manual_seed(int(router.pack.tokens_T.sum()) * 64 + router.layer_number)
        gumbel = -torch.log(-torch.log(torch.rand(scores.shape, generator=draw, dtype=torch.float64)))
        chosen = (heat + gumbel).topk(router.topk, dim=-1).indices
        return logits.gather(1, chosen).softmax(dim=-1), chosen

    PlannedRouter._choose = choose


def on_rank(arguments: argparse.Namespace) -> None:
    if arguments.workload != "real":
        force(arguments.workload, arguments.ranks)
    from evenload.api import load_recipe
    from evenload.training.verbs.bench import bench

    words = (*SETTINGS, f"parallel.ep={arguments.ranks}", f"parallel.dp={arguments.ranks}", *arguments.settings)
    result = bench(load_recipe("moe", words), tuple(arguments.against))
    if result is not None and int(os.environ["RANK"]) == 0:
        print(json.dumps(result))


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """Of all ranks, started by torchrun."""
    return {"workload": asked.workload, "ranks": asked.ranks, **started(__file__, asked.ranks)}


def table(result: dict[str, Any]) -> Any:
    rows = []
    for name, path in result["critical_path"].items():
        ratio, peak = result["ratio"].get(name), result["peak_activation_bytes"][name] / (1 << 20)
        shown: tuple[Any, ...] = ("", "", "", "")
        if ratio is not None:
            faster = (f"{ratio['of_totals']:.3f}x", interval(ratio, 3))
            shown = (*faster, f"{ratio['allowed']:.3f}x", f"{ratio['of_allowed']:.3f}")
        paths = [f"{path[key]:.3f}" for key in ("critical_s", "evened_experts_s", "evened_s")]
        rows.append((name, *shown, *paths, f"{peak:.0f}"))
    head = ("against", "speedup", "95 %", "allowed", "of allowed", "critical path s", "even experts")
    title = f"{result['workload']}, EP {result['ranks']}, {result['steps']} steps, alternating, measured"
    return grid(title, (*head, "even", "peak MiB"), rows)


if __name__ == "__main__":
    against = ["static", "eplb", "ultraep", "moonep"]
    own = options(__doc__, workload=("real", "W0", "W1", "W2"), ranks=2, against=against, settings=...)
    main(own, benchmark, table, on_rank)
