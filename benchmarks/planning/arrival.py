"""What a step costs with its plan's arrival, on steps that last as long as they are predicted to.

    python benchmarks/planning/arrival.py [--lengths FILE] [--max-length 131072] [--layout 4x16x8[:512] ...]
                                          [--steps 20] [--local-ranks 1 2 4 8] [--budget-ms MS] [--real] [--json]
                                          [--out FILE]

A llama of 13B on H200s, packing, mesh and pipeline of 16,384 tokens; a layout is PP x DP x TP and its samples a step
(default 512), of one pipeline stage without the plugin pipeline.

modelled   The stages of every batch are planned once, and their CPU seconds measured. Then `Planner`'s rules are walked
           through with these seconds, for nodes of so many ranks that take turns: as many threads plan at once, which
           is why this is modelled, with as many cores. Each plan travels for as long as it takes to write and read it
           here. Threads are not slowed by the step beside them.
--real     The real `Planner`: the step sleeps for its predicted seconds while plans are made in threads, as in
           training. Under torchrun, ranks take turns over a real board. On a machine that does other work a second of
           planning takes longer: ``slower`` is by how much the wall is behind the CPU in planning these batches, and
           predicted seconds, budgets and waits are scaled by it.

The first plans begin a second before the first step. "finished" is the plan of `PlanChain.plan`, "stock" the trainer's
own; a step is its wait and its passes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import statistics
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning import planner as planning
from evenload.core.planning.chain import STOCK, PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.planning.planner import Draw, Planner
from evenload.core.planning.stages import Stages
from evenload.core.planning.turns import dumped, loaded
from evenload.core.recipe.recipe import parse
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.runtime.world.agreement import gather_bytes, rank_and_size
from evenload.runtime.world.node_board import open_board
from evenload.runtime.world.world import init_world

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


class Profile(NamedTuple):
    """A batch, planned stage by stage. All seconds."""

    done_s: list[float]
    """CPU, from the first stage on, when a stage is done."""
    best_s: list[float]
    """Step of the best plan after each stage; infinite where there is none."""
    travel_s: float
    """To write, and to read, the last plan."""
    stock_s: float
    wall_s: float
    """Of planning it."""
    made_by: list[str]


def profile_of(chain: PlanChain, batch: Lengths) -> Profile:
    """Plan a batch."""
    stages, done_s = Stages(chain, as_lengths(batch)), list[float]()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in stages.run():
        done_s.append(time.process_time() - cpu_s)
    wall_s, best = time.perf_counter() - wall_s, stages.best[1:]
    cpu_s = time.process_time()
    assert best[-1] is not None
    assert loaded(dumped(best[-1]), stages.batch, chain.limits).plan.digest == best[-1].plan.digest
    return Profile(
        done_s,
        [one.step_s if one else math.inf for one in best],
        time.process_time() - cpu_s,
        outcome_of(chain.stock(as_lengths(batch)), chain.context).step_s,
        wall_s,
        [one.plan.made_by if one else "" for one in best],
    )


def modelled(profiles: list[Profile], local_ranks: int, budget_s: float | None) -> list[dict[str, Any]]:
    """A row a step, of nodes of so many ranks."""
    ahead, travel = (2, 0.0) if local_ranks == 1 else (local_ranks, 1.0)
    free_s = [-1.0] * local_ranks
    begun_s = [-1.0] * min(ahead, len(profiles))
    now_s, saved_s, rows = 0.0, planning.MOST_SAVED_S, list[dict[str, Any]]()
    for step, one in enumerate(profiles):
        rank = step % local_ranks
        start_s = max(begun_s[step], free_s[rank])
        done_s = [start_s + seconds + travel * one.travel_s for seconds in one.done_s]
        reached = [s for s, seconds in zip(one.best_s, done_s, strict=True) if seconds <= now_s and s < math.inf]
        share_s = saved_s + planning.SHARE * (reached[-1] if reached else 0.0)
        first_s = next(seconds for s, seconds in zip(one.best_s, done_s, strict=True) if s < math.inf)
        goes_s = min(done_s[-1], max(now_s + (share_s if budget_s is None else budget_s), first_s))
        wait_s = max(0.0, goes_s - now_s)
        stage = sum(seconds <= now_s + wait_s for seconds in done_s) - 1
        now_s += wait_s
        # A late plan ends with the stage that it is in.
        free_s[rank] = next((seconds for seconds in done_s if seconds >= now_s), done_s[-1])
        begun_s.append(now_s)
        passes_s = one.best_s[stage]
        saved_s = min(planning.MOST_SAVED_S, max(0.0, saved_s - wait_s + planning.SHARE * one.best_s[stage]))
        now_s += passes_s
        rows.append({"wait_s": wait_s, "passes_s": passes_s, "made_by": one.made_by[stage]})
    return rows


def arrive(chain: PlanChain, drawn: list[Lengths], budget_s: float | None, slower: float) -> list[dict[str, Any]]:
    """A row a step, by the real planner. All seconds as on an idle machine."""
    planning.MOST_SAVED_S *= slower
    planning.SHARE *= slower
    left: Iterable[Lengths] = iter(drawn)
    draw = lambda: Draw(np.arange(len(drawn[0])), next(left), {})  # type: ignore[call-overload]  # noqa: E731
    turns = open_board()
    how: Any = {"exchange": gather_bytes, "turns": turns, "steps_ahead": turns.size if turns else 2}
    planner = Planner(chain, draw, budget_s=budget_s and budget_s * slower, **how)
    planner.prepare(len(drawn))
    time.sleep(slower)
    rows: list[dict[str, Any]] = []
    for place in range(len(drawn)):
        planned = planner.next(ahead=len(drawn) - 1 - place)
        passes_s = outcome_of(planned.plan, chain.context).step_s
        rows.append({"wait_s": planned.waited_s / slower, "passes_s": passes_s, "made_by": planned.plan.made_by})
        time.sleep(passes_s * slower)
    return rows


def summary(rows: list[dict[str, Any]], profiles: list[Profile], local_ranks: int, real: bool) -> dict[str, Any]:
    """What steps come to, beside those of finished plans and of stock."""
    for row, one in zip(rows, profiles, strict=True):
        row |= {"step_s": row["wait_s"] + row["passes_s"], "finished_s": one.best_s[-1], "stock_s": one.stock_s}
    sums = {key: sum(row[key] for row in rows) for key in ("wait_s", "step_s", "finished_s", "stock_s")}
    return {
        "local_ranks": local_ranks,
        "how": "real planner" if real else "modelled",
        "over_finished": sums["step_s"] / sums["finished_s"],
        "over_stock": sums["step_s"] / sums[f"{STOCK}_s"],
        "waited_frac": sums["wait_s"] / sums["step_s"],
        "slower_than_stock": sum(row["step_s"] > row["stock_s"] for row in rows),
        "whole_plans": sum(row["passes_s"] <= row["finished_s"] * (1 + 1e-9) for row in rows),
        "rows": rows,
    }


def benchmark(
    lengths: Lengths,
    layout: tuple[int, int, int, int],
    steps: int,
    local_ranks: Sequence[int],
    budget_s: float | None,
    *,
    real: bool = False,
) -> dict[str, Any]:
    """All steps of one layout."""
    load_plugins()
    logging.getLogger("evenload").setLevel(logging.ERROR)
    chain, drawn = chain_of(layout[:3], layout[3]), list(batches(lengths, layout[3], steps))
    profiles = [profile_of(chain, batch) for batch in drawn]
    slower = max(1.0, sum(one.wall_s for one in profiles) / sum(one.done_s[-1] for one in profiles))
    if real:
        slower = max(struct.unpack("d", one)[0] for one in gather_bytes(struct.pack("d", slower)))
        runs = [summary(arrive(chain, drawn, budget_s, slower), profiles, rank_and_size()[1], True)]
    else:
        runs = [summary(modelled(profiles, count, budget_s), profiles, count, False) for count in local_ranks]
    return {
        "predicted": True,
        "layout": "PP {} x DP {} x TP {}".format(*layout),
        "ranks": math.prod(layout[:3]),
        "samples": layout[3],
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "slower": slower,
        "plan_s": statistics.mean(one.done_s[-1] for one in profiles),
        "step_s": statistics.mean(one.best_s[-1] for one in profiles),
        "travel_s": statistics.mean(one.travel_s for one in profiles),
        "budget_s": budget_s,
        "runs": runs,
    }


def table(results: list[dict[str, Any]]) -> Any:
    rows = [
        (
            result["layout"],
            str(result["ranks"]),
            str(result["samples"]),
            f"{result['plan_s']:.3f}",
            f"{result['step_s']:.3f}",
            f"{run['local_ranks']}, {run['how']}",
            f"{run['over_finished']:.2f}",
            f"{run['over_stock']:.2f}",
            f"{run['waited_frac']:.1%}",
            f"{run['whole_plans']} of {len(run['rows'])}",
            str(run["slower_than_stock"]),
        )
        for result in results
        for run in result["runs"]
    ]
    head = ("layout", "ranks", "samples", "plan CPU s", "finished step s", "ranks of a node", "over finished")
    more = ("over stock", "waiting", "whole plans", "slower than stock")
    first = results[0]
    caption = f"steps predicted; planning in CPU s, wall {first['slower']:.1f}x; {first['machine']}"
    return grid("Mean step with the arrival of its plan", (*head, *more), rows, caption)


def _layout(text: str) -> tuple[int, int, int, int]:
    shape, _, samples = text.partition(":")
    pp, dp, tp = map(int, shape.split("x"))
    return pp, dp, tp, int(samples or 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help=".npy, .txt, .jsonl or Megatron .idx")
    parser.add_argument("--max-length", type=int, default=131072, help="Tokens.")
    parser.add_argument("--layout", type=_layout, nargs="+", default=[(4, 16, 8, 512)], help="PPxDPxTP[:SAMPLES]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local-ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budget-ms", type=float, help="planner.budget_ms; none: a share of the step.")
    parser.add_argument("--real", action="store_true", help="The real planner, on these ranks.")
    parser.add_argument("--json", action="store_true", help="Print a JSON list instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    asked = parser.parse_args()
    most = max(layout[3] for layout in asked.layout)
    whole = read_lengths(asked.lengths) if asked.lengths else synthetic(4 * most, asked.max_length)
    lengths = cut(whole, asked.max_length, "split", 2).length
    budget_s = asked.budget_ms and asked.budget_ms / 1e3
    if asked.real:
        init_world()
    how = asked.steps, asked.local_ranks, budget_s
    results = [benchmark(lengths, layout, *how, real=asked.real) for layout in asked.layout]
    if rank_and_size()[0] == 0:
        if asked.out:
            asked.out.write_text(json.dumps(results, indent=1) + "\n")
        emit(results, asked.json, table)


if __name__ == "__main__":
    main()
