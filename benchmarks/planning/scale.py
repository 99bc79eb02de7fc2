"""What planning costs as the plane grows: packing and mesh, so many sequences a rank; steps predicted, one process.

    python benchmarks/planning/scale.py [--lengths FILE] [--max-length 131072] [--ranks 64,1024,4096,16384] [--each 64]
                                        [--json] [--out FILE]

A llama of 7B on H200s, optimizer over all ranks, micro-batches of 16,384 tokens. CPU seconds are those of
`PlanChain.plan`: packing, mesh, baselines and the check of every law; "laws" is one check of a plan that nobody has
looked at, "digest" what ranks compare. GiB is the most that the process held, the batch and everything else included:
each row runs in a process of its own. Over bound: the step over the certified bound that the plan carries.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.benchmarks.chains import batches, body_of, chain_of, plugins
from evenload.benchmarks.frame import Row, columns, machine, options, show, timed
from evenload.benchmarks.published.common import MODELS
from evenload.core.laws import check
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.judge import outcome_of

PLUGINS = ("packing", "mesh")


def row(file: Path | None, max_length: int, ranks: int, each: int) -> Row:
    """One batch on one plane."""
    logging.getLogger("evenload").setLevel(logging.ERROR)
    sequences = ranks * each
    (batch,) = batches(body_of(file, min(sequences, 1 << 16), max_length), sequences, 1)
    chain = chain_of(
        {
            "model": {"vocab_size": 32000, **MODELS["llama-7b"]},
            "parallel": {"dp": ranks},
            "train": {"dtype": "bf16", "global_batch_size": sequences},
            "megatron": {"distributed_optimizer": True},
            "cluster": "h200",
            "plugins": plugins(16384, *PLUGINS),
        }
    )
    # What is worked out once for a recipe is not part of planning a step.
    chain.plan(as_lengths(batch[: 4 * ranks]))
    plan, plan_s = timed(lambda: chain.plan(batch), 1)
    step_s = outcome_of(plan, chain.context).step_s
    return {
        "ranks": ranks,
        "sequences": sequences,
        "plugins": "+".join(PLUGINS),
        "plan_cpu_s": plan_s,
        "laws_cpu_s": timed(lambda: check(replace(plan)), 1)[1],
        "digest_cpu_s": timed(lambda: plan.digest, 1)[1],
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "step_s": step_s,
        "over_bound": step_s / plan.bound_s,
        "planning_over_step": plan_s / step_s,
        "micro_batches": len(plan.micro_batches),
        "made_by": plan.made_by,
    }


def benchmark(asked: Any) -> Row:
    """A row for each plane, each in a process of its own."""
    rows = []
    for ranks in asked.ranks:
        own = ["--one", str(ranks), "--each", str(asked.each), "--max-length", str(asked.max_length)]
        own += ["--lengths", str(asked.lengths)] if asked.lengths else []
        answer = subprocess.run([sys.executable, __file__, *own], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(answer.stdout))
    lengths = asked.lengths.name if asked.lengths else "synthetic"
    return {"predicted": True, "lengths": lengths, "machine": machine(), "rows": rows}


def table(result: Row) -> Any:
    cells = {
        "ranks": "{ranks:,}",
        "sequences": "{sequences:,}",
        "plan CPU s": "{plan_cpu_s:.2f}",
        "laws s": "{laws_cpu_s:.2f}",
        "digest s": "{digest_cpu_s:.2f}",
        "GiB": "{gib:.2f}",
        "step s": "{step_s:.3f}",
        "over bound": "{over_bound:.3f}",
        "plan of": "{made_by}",
    }
    caption = f"steps predicted; {result['machine']}"
    return columns(f"packing + mesh, {result['lengths']}", result["rows"], cells, caption)


if __name__ == "__main__":
    ranks = [64, 1024, 4096, 16384]
    asked = options(__doc__, lengths=Path, max_length=131072, ranks=ranks, each=64, one=0).parse_args()
    if asked.one:
        print(json.dumps(row(asked.lengths, asked.max_length, asked.one, asked.each)))
    else:
        show(benchmark(asked), asked, table)
