"""What a step costs with its plan's arrival: the real `Planner`, on steps that last as long as they are predicted to.

    python benchmarks/planning/arrival.py [--lengths FILE] [--max-length 131072] [--layout 4x16x8] [--samples 512]
                                          [--steps 20] [--budget-ms MS] [--json] [--out FILE]

A llama of 13B on H200s, packing, mesh and pipeline of 16,384 tokens; the layout is PP x DP x TP, of one pipeline stage
without the plugin pipeline. The step sleeps for its predicted seconds while the next one is planned in a thread, as in
training; the first plan begins a second before. On a machine that does other work a second of planning takes longer:
``slower`` is by how much the wall is behind the CPU in planning one batch, and predicted seconds, budgets and waits are
scaled by it. "finished" is the plan of `PlanChain.plan`, "stock" the trainer's own; a step is its wait and its passes.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning import planner as planning
from evenload.core.planning.chain import STOCK, PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.planning.planner import Draw, Planner
from evenload.core.recipe.recipe import parse
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut

sys.path.append(str(Path(__file__).parent))

from planner import Lengths, batches, synthetic

MODEL = {
    "num_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "ffn_hidden_size": 13824,
    "vocab_size": 32000,
}


def chain_of(layout: tuple[int, int, int], samples: int) -> PlanChain:
    """The planners of the case."""
    pp, dp, tp = layout
    names = ("packing", "mesh", *(("pipeline",) if pp > 1 else ()))
    recipe = parse(
        {
            "model": MODEL,
            "parallel": {"pp": pp, "dp": dp, "tp": tp},
            "train": {"dtype": "bf16", "global_batch_size": samples},
            "cluster": "h200",
            "plugins": {name: {"enabled": True, "max_tokens": 16384} for name in names},
        }
    )
    return PlanChain.of_recipe(recipe, recipe.layout())


def slowness(chain: PlanChain, batch: Lengths) -> tuple[float, float]:
    """(CPU seconds of a plan, wall over CPU seconds of it)."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    chain.plan(as_lengths(batch))
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    return cpu_s, max(1.0, wall_s / cpu_s)


def arrive(chain: PlanChain, drawn: list[Lengths], budget_s: float | None, slower: float) -> list[dict[str, Any]]:
    """A row a step, of as many steps as there are batches but one. All seconds as on an idle machine."""
    planning.MOST_SAVED_S *= slower
    planning.SHARE *= slower
    left: Iterable[Lengths] = iter(drawn)
    draw = lambda: Draw(np.arange(len(drawn[0])), next(left), {})  # type: ignore[call-overload]  # noqa: E731
    planner = Planner(chain, draw, budget_s=budget_s and budget_s * slower)
    planner.prepare()
    time.sleep(slower)
    rows: list[dict[str, Any]] = []
    for place in range(len(drawn) - 1):
        planned = planner.next(ahead=place < len(drawn) - 2)
        passes_s = outcome_of(planned.plan, chain.context).step_s
        rows.append({"wait_s": planned.waited_s / slower, "passes_s": passes_s, "made_by": planned.plan.made_by})
        time.sleep(passes_s * slower)
    planner.forget()
    for row, batch in zip(rows, drawn, strict=False):
        row["step_s"] = row["wait_s"] + row["passes_s"]
        row |= {"finished_s": _step(chain.plan(batch), chain), "stock_s": _step(chain.stock(batch), chain)}
    return rows


def _step(plan: StepPlan, chain: PlanChain) -> float:
    return outcome_of(plan, chain.context).step_s


def benchmark(
    lengths: Lengths, name: str, layout: tuple[int, int, int], samples: int, steps: int, budget_s: float | None
) -> dict[str, Any]:
    """All steps of one layout."""
    load_plugins()
    logging.getLogger("evenload").setLevel(logging.ERROR)
    chain, drawn = chain_of(layout, samples), list(batches(lengths, samples, steps + 1))
    plan_s, slower = slowness(chain, drawn[0])
    rows = arrive(chain, drawn, budget_s, slower)
    sums = {key: sum(row[key] for row in rows) for key in ("wait_s", "step_s", "finished_s", "stock_s")}
    return {
        "predicted": True,
        "lengths": name,
        "layout": "PP {} x DP {} x TP {}".format(*layout),
        "samples": samples,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "slower": slower,
        "plan_s": plan_s,
        "budget_s": budget_s,
        "over_finished": sums["step_s"] / sums["finished_s"],
        "over_stock": sums["step_s"] / sums[f"{STOCK}_s"],
        "waited_frac": sums["wait_s"] / sums["step_s"],
        "slower_than_stock": sum(row["step_s"] > row["stock_s"] for row in rows),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Any:
    rows = [
        (str(i), f"{r['wait_s']:.3f}", r["made_by"], *(f"{r[f'{key}_s']:.3f}" for key in ("step", "finished", "stock")))
        for i, r in enumerate(result["rows"])
    ]
    caption = (
        f"predicted; mean step {result['over_finished']:.2f}x of the finished plan's, {result['over_stock']:.2f}x of "
        f"stock's, {result['waited_frac']:.1%} of it waiting, {result['slower_than_stock']} slower than stock; a plan "
        f"takes {result['plan_s']:.2f} CPU s, wall {result['slower']:.1f}x, {result['machine']}"
    )
    head = ("step", "wait s", "runs", "step s", "finished plan s", "stock s")
    return grid(f"{result['samples']} samples of {result['lengths']}, {result['layout']}", head, rows, caption)


def _layout(text: str) -> tuple[int, int, int]:
    pp, dp, tp = map(int, text.split("x"))
    return pp, dp, tp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help=".npy, .txt, .jsonl or Megatron .idx")
    parser.add_argument("--max-length", type=int, default=131072, help="Tokens.")
    parser.add_argument("--layout", type=_layout, default=(4, 16, 8), help="PPxDPxTP")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget-ms", type=float, help="planner.budget_ms; none: a share of the step.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    asked = parser.parse_args()
    whole = read_lengths(asked.lengths) if asked.lengths else synthetic(4 * asked.samples, asked.max_length)
    lengths = cut(whole, asked.max_length, "split", 2).length
    name = asked.lengths.name if asked.lengths else "synthetic"
    budget_s = asked.budget_ms and asked.budget_ms / 1e3
    result = benchmark(lengths, name, asked.layout, asked.samples, asked.steps, budget_s)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, asked.json, table)


if __name__ == "__main__":
    main()
