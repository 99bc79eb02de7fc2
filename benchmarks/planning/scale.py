"""What planning costs as the plane grows: packing and mesh, so many sequences a rank; steps predicted, one process.

    python benchmarks/planning/scale.py [--lengths FILE] [--max-length 131072] [--ranks 64,1024,4096,16384] [--each 64]
                                        [--json] [--out FILE]

A llama of 7B on H200s, optimizer over all ranks, micro-batches of 16,384 tokens. CPU seconds are those of
`PlanChain.plan`: packing, mesh, baselines and the check of every law; "laws" is one check of a plan that nobody has
looked at, "digest" what ranks compare. GiB is the most that the process held, the batch and everything else included:
each row runs in a process of its own. Over bound: the step over the certified bound that the plan carries.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.laws import check
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.recipe import parse
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut

sys.path.append(str(Path(__file__).parent))

from planner import batches, synthetic

MODEL = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 11008,
    "vocab_size": 32000,
}
PLUGINS = ("packing", "mesh")


def chain_of(ranks: int, sequences: int) -> PlanChain:
    """The planners of the case."""
    recipe = parse(
        {
            "model": MODEL,
            "parallel": {"dp": ranks},
            "train": {"dtype": "bf16", "global_batch_size": sequences},
            "megatron": {"distributed_optimizer": True},
            "cluster": "h200",
            "plugins": {name: {"enabled": True, "max_tokens": 16384} for name in PLUGINS},
        }
    )
    return PlanChain.of_recipe(recipe, recipe.layout())


def taken(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and the CPU seconds it takes."""
    begun = time.process_time()
    return work(), time.process_time() - begun


def row(file: Path | None, max_length: int, ranks: int, each: int) -> dict[str, Any]:
    """One batch on one plane."""
    load_plugins()
    logging.getLogger("evenload").setLevel(logging.ERROR)
    sequences = ranks * each
    whole = read_lengths(file) if file else synthetic(min(sequences, 1 << 16), max_length)
    (batch,) = batches(cut(whole, max_length, "split", 2).length, sequences, 1)
    chain = chain_of(ranks, sequences)
    # What is worked out once for a recipe is not part of planning a step.
    chain.plan(as_lengths(batch[: 4 * ranks]))
    plan, plan_s = taken(lambda: chain.plan(as_lengths(batch)))
    step_s = outcome_of(plan, chain.context).step_s
    result = {
        "ranks": ranks,
        "sequences": sequences,
        "plugins": "+".join(PLUGINS),
        "plan_cpu_s": plan_s,
        "laws_cpu_s": taken(lambda: check(replace(plan)))[1],
        "digest_cpu_s": taken(lambda: plan.digest)[1],
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "step_s": step_s,
        "over_bound": step_s / plan.bound_s,
        "planning_over_step": plan_s / step_s,
        "micro_batches": len(plan.micro_batches),
        "made_by": plan.made_by,
    }
    return result


def benchmark(asked: argparse.Namespace) -> dict[str, Any]:
    """A row for each plane, each in a process of its own."""
    rows = []
    for ranks in asked.ranks:
        own = ["--one", str(ranks), "--each", str(asked.each), "--max-length", str(asked.max_length)]
        own += ["--lengths", str(asked.lengths)] if asked.lengths else []
        answer = subprocess.run([sys.executable, __file__, *own], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(answer.stdout))
    return {
        "predicted": True,
        "lengths": asked.lengths.name if asked.lengths else "synthetic",
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Any:
    rows = [
        (
            f"{r['ranks']:,}",
            f"{r['sequences']:,}",
            f"{r['plan_cpu_s']:.2f}",
            f"{r['laws_cpu_s']:.2f}",
            f"{r['digest_cpu_s']:.2f}",
            f"{r['gib']:.2f}",
            f"{r['step_s']:.3f}",
            f"{r['over_bound']:.3f}",
            r["made_by"],
        )
        for r in result["rows"]
    ]
    head = ("ranks", "sequences", "plan CPU s", "laws s", "digest s", "GiB", "step s", "over bound", "plan of")
    return grid(f"packing + mesh, {result['lengths']}", head, rows, f"steps predicted; {result['machine']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help=".npy, .txt, .jsonl or Megatron .idx")
    parser.add_argument("--max-length", type=int, default=131072, help="Tokens.")
    parser.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=[64, 1024, 4096, 16384])
    parser.add_argument("--each", type=int, default=64, help="Sequences a rank.")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(row(asked.lengths, asked.max_length, asked.one, asked.each)))
        return
    result = benchmark(asked)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
