"""Predicted against measured peak memory of many plans, through both trainers; `memory.py --plans` runs this.

    python benchmarks/memory/memory.py --plans [--only TEXT] [--json] [--out FILE]

`evenload profile`'s memory part (`training.profiling.memory`) measures each trainer, precision and ZeRO stage once, on
one rank without recomputation. Then plans that were not measured run on 1 or 2 ranks: uneven packs, several
micro-batches alive, slices with prefix KV, replays, two pipeline stages, recomputation, every ZeRO stage. A row is a
rank of a stage.

    activations   predicted: `core.costs.memory`, or what gradient sum and update take; measured: the most that a step
                  holds beyond what is there between steps (`runtime.measure.memory`: tracked storages on a CPU)
    in all        the same with weights and optimizer states: `Simulation.peak_bytes`; measured: what is alive between
                  steps (`runtime.measure.memory`) and the peak above it

DeepSpeed's reduce_bucket_size is 10^6 here: its default makes ZeRO 1 and 2 take 2 GB for the gradient sum (and ZeRO 3
keep 2 GB), next to which plans of this size would not be seen.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from evenload.benchmarks.chains import recipe_of
from evenload.benchmarks.frame import Row, begun
from evenload.commands.tables.show import grid
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.memory import fixed_bytes
from evenload.core.laws import check
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.rounds import in_rounds
from evenload.core.plan.step_plan import Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting, context_of, costs_of, limits_of, stage_costs
from evenload.core.recipe.recipe import Recipe
from evenload.core.simulate.step import simulate
from evenload.integrations.host.host import Host
from evenload.patches import bridge_cpu
from evenload.plugins.packing.assemble import assemble
from evenload.runtime.measure.memory import Levels, live_bytes
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.runtime.world.world import World, close_world, init_world
from evenload.training.hosts import integration
from evenload.training.job import Job
from evenload.training.profiling.memory import measure_memory, random_tokens
from evenload.training.verbs.profile import machine

MAX_TOKENS = 8192


class Case(NamedTuple):
    """One recipe and the plans that run on its host."""

    name: str
    trainer: str
    ranks: int = 1
    changes: tuple[tuple[str, Any], ...] = ()
    plans: tuple[str, ...] = ("packs", "slices", "replays")
    profile: bool = False
    """Measure the memory costs of its trainer, precision and ZeRO stage first, for itself and later cases."""

    @property
    def recipe(self) -> Recipe:
        zero = {"zero_optimization": {"reduce_bucket_size": 1_000_000}}
        recipe = recipe_of(
            {
                "trainer": self.trainer,
                "model": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1024},
                "data": {"max_length": MAX_TOKENS},
                "parallel": {"dp": self.ranks},
                "train": {"global_batch_size": 4},
                "deepspeed": {"zero_stage": 0, "config": zero if self.trainer == "deepspeed" else {}},
            }
        )
        return recipe.changed(dict(self.changes))

    @property
    def costs(self) -> str:
        """What its costs belong to."""
        recipe = self.recipe
        experts = " experts" if recipe.model.moe else ""
        return f"{self.trainer} {recipe.train.dtype} {recipe.deepspeed.zero_stage}{experts}"


PP2 = (("parallel.dp", 1), ("parallel.pp", 2))
TP2 = (("parallel.dp", 1), ("parallel.tp", 2))
DIVIDED = (*TP2, ("megatron.sequence_parallel", True))
MOE = (("model.family", "mixtral"), ("model.moe", {"num_experts": 8, "topk": 2, "ffn_hidden_size": 256}))
EP2 = (*MOE, ("parallel.ep", 2))
CASES = (
    Case("megatron", "megatron", profile=True),
    Case("megatron, bf16", "megatron", changes=(("train.dtype", "bf16"),), plans=("slices",), profile=True),
    Case("megatron, recompute", "megatron", changes=(("train.recompute", True),)),
    Case("megatron, DP 2", "megatron", ranks=2),
    Case("megatron, PP 2", "megatron", ranks=2, changes=PP2, plans=("packs", "stock", "slices", "replays")),
    Case("megatron, TP 2", "megatron", ranks=2, changes=TP2),
    Case("megatron, TP 2, recompute", "megatron", ranks=2, changes=(*TP2, ("train.recompute", True))),
    Case("megatron, TP 2, sequence parallel", "megatron", ranks=2, changes=DIVIDED),
    Case("megatron, TP 2, sequence parallel, recompute", "megatron", 2, (*DIVIDED, ("train.recompute", True))),
    Case("zero 0", "deepspeed", profile=True),
    Case("zero 0, recompute", "deepspeed", changes=(("train.recompute", True),)),
    *(Case(f"zero {n}", "deepspeed", changes=(("deepspeed.zero_stage", n),), profile=True) for n in (1, 2, 3)),
    *(Case(f"zero {n}, DP 2", "deepspeed", ranks=2, changes=(("deepspeed.zero_stage", n),)) for n in (1, 2, 3)),
    Case("megatron, experts", "megatron", changes=MOE, profile=True),
    Case("megatron, experts, recompute", "megatron", changes=(*MOE, ("train.recompute", True))),
    Case("megatron, experts, EP 2", "megatron", ranks=2, changes=EP2),
    Case("megatron, experts, TP 2, sequence parallel", "megatron", ranks=2, changes=(*MOE, *DIVIDED)),
    Case("megatron, experts, EP 2, recompute", "megatron", ranks=2, changes=(*EP2, ("train.recompute", True))),
    Case("megatron, experts, EP 2 x DP 2", "megatron", ranks=4, changes=EP2),
    Case("megatron, experts, PP 2 x EP 2", "megatron", 4, (*EP2, ("parallel.dp", 2), ("parallel.pp", 2))),
    Case("zero 1, experts", "deepspeed", changes=(*MOE, ("deepspeed.zero_stage", 1)), profile=True),
    Case("zero 1, experts, EP 2", "deepspeed", ranks=2, changes=(*EP2, ("deepspeed.zero_stage", 1))),
)


def plan_of(kind: str, num_ranks: int, limits: Limits) -> StepPlan:
    """A plan of each kind for the plane's ranks; ranks have different work."""
    if kind in ("packs", "stock"):
        lengths = 2 * [[[700, 200], [350, 150, 100]], [[500], [300, 250, 200]]]
        if kind == "stock":
            lengths = 4 * [[[250], [400, 100], [500], [150, 150], [350]]]
        numbers = count()
        rows = [[[Slice(next(numbers), 0, n) for n in pack] for pack in own] for own in lengths[:num_ranks]]
        batch = [n for own in lengths[:num_ranks] for pack in own for n in pack]
    else:
        batch = [1800, 900, 1200, 600][:num_ranks]
        rows = [pieces(i, n, (6, 4)[i % 2]) for i, n in enumerate(batch)]
        rows[0][-1].append(Slice(len(batch), 0, 200))
        batch.append(200)
    plan = assemble(StepPlan(as_lengths(batch), (), limits), limits, rows)
    if kind == "replays":
        kept = max(2 * num_ranks, 1)
        plan = replace(plan, replayed=tuple(range(len(plan.micro_batches) - kept)))
    return check(in_rounds(plan))


def pieces(sequence: int, length: int, count: int) -> list[list[Slice]]:
    """A sequence in so many slices of equal length."""
    borders = np.linspace(0, length, count + 1).astype(int).tolist()
    return [[Slice(sequence, a, b)] for a, b in pairwise(borders)]


def measured(recipe: Recipe, world: World, host: Host) -> MemoryCost:
    """The memory part of a profile on an open host."""
    source: Any = None  # random tokens are measured
    with Watchdog() as watchdog:
        chain = PlanChain.of_recipe(recipe, recipe.layout(world.size))
        return measure_memory(Job(recipe, world, host, chain, watchdog, source), MAX_TOKENS)


def predicted_at(recipe: Recipe, memory: MemoryCost, num_ranks: int) -> tuple[PlanningContext, Limits]:
    """Situation and limits of a recipe under measured memory costs."""
    layout = recipe.layout(num_ranks)
    counted = context_of(Setting.of_recipe(recipe), layout)
    costs = costs_of(Setting.of_recipe(recipe), counted.cluster).model_copy(update={"memory": memory})
    context = replace(counted, costs=stage_costs(Setting.of_recipe(recipe), costs, layout))
    return context, replace(limits_of(Setting.of_recipe(recipe), context), max_tokens=MAX_TOKENS)


def rank_main(case: Case, costs_file: Path, answer: Path) -> None:
    """One rank of a case: profile if it must, run the plans, leave the rows."""
    bridge_cpu()
    world = init_world()
    torch.set_num_threads(1)
    recipe, rows = case.recipe, []
    host = integration(recipe.trainer).open_host(recipe, world)
    known = json.loads(costs_file.read_text())
    if case.profile:
        known[case.costs] = measured(recipe, world, host).model_dump()
        costs_file.write_text(json.dumps(known))
    memory = MemoryCost.model_validate(known[case.costs])
    context, limits = predicted_at(recipe, memory, world.size)
    tokens_of = random_tokens(recipe)
    for kind in case.plans:
        plan = plan_of(kind, context.layout.dp_cp_size, limits)
        host.train_step(plan, tokens_of, lr=0.0)
        gc.collect()
        fixed = live_bytes(world.device)
        with Levels(world.device) as levels:
            host.train_step(plan, tokens_of, lr=0.0)
        peak = levels.read()[1]
        stage, rank = host.pipeline_stage, host.dp_cp_rank
        total = float(simulate(plan, context, record=False).peak_bytes[stage, rank])
        rows.append(
            {
                "case": case.name,
                "plan": kind,
                "stage": stage,
                "rank": rank,
                "activations": total - fixed_bytes(context.costs.memory, limits),
                "activations_measured": peak,
                "total": total,
                "total_measured": fixed + peak,
            }
        )
    answer.with_suffix(f".{world.rank}").write_text(json.dumps(rows))
    host.close()
    close_world(world)


def benchmark(only: str = "") -> Row:
    """All cases whose name holds ``only``, and those that measure their costs."""
    wanted = {case.costs for case in CASES if only in case.name}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        costs_file = Path(folder) / "costs.json"
        costs_file.write_text("{}")
        for number, case in enumerate(CASES):
            if only in case.name or (case.profile and case.costs in wanted):
                rows += _spawn(number, case, costs_file, Path(folder) / f"rows{number}.json")
                print(f"{case.name}: {[round(100 * e, 1) for e in errors(rows, 'activations')]} %", file=sys.stderr)
        costs = json.loads(costs_file.read_text())
    return {"machine": machine(torch.device("cpu")), "torch": torch.__version__, "costs": costs, "rows": rows}


def _spawn(number: int, case: Case, costs_file: Path, answer: Path) -> list[Row]:
    words = [str(number), str(costs_file), str(answer)]
    job = begun(__file__, words, case.ranks)
    out, _ = job.communicate()
    if job.returncode:
        raise SystemExit(f"{case.name}: ranks ended with {job.returncode}\n{out[-2000:]}")
    return [row for r in range(case.ranks) for row in json.loads(answer.with_suffix(f".{r}").read_text())]


def errors(rows: list[Row], name: str) -> list[float]:
    """Relative errors of ``activations`` or ``total``."""
    return [row[name] / row[f"{name}_measured"] - 1.0 for row in rows]


def table(result: Row) -> Any:
    """One line a rank and plan, then mean and worst."""
    rows = result["rows"]

    def mib(row: Row, name: str) -> tuple[str, str, str]:
        predicted, measured = row[name], row[f"{name}_measured"]
        return f"{predicted / 2**20:,.1f}", f"{measured / 2**20:,.1f}", f"{100 * (predicted / measured - 1):+.1f} %"

    lines = [
        (f"{r['case']}: {r['plan']}, stage {r['stage']} rank {r['rank']}", *mib(r, "activations"), *mib(r, "total"))
        for r in rows
    ]
    for name, of in (("mean", np.mean), ("worst", np.max)):
        parts = [f"{100 * float(of(np.abs(errors(rows, key)))):.1f} %" for key in ("activations", "total")]
        lines.append((name, "", "", parts[0], "", "", parts[1]))
    head = ("", "activations", "measured", "error", "in all", "measured", "error")
    return grid("peak memory [MiB]", head, lines, f"{result['machine']}; torch {result['torch']}")


if __name__ == "__main__":
    rank_main(CASES[int(sys.argv[1])], Path(sys.argv[2]), Path(sys.argv[3]))
