"""Ranks shared out among sequences: FlexSP's problem, Megatron's scheduler, large planes. Predicted; planning measured.

    python benchmarks/planning/mesh.py [--lengths FILE] [--batches 8] [--quick] [--json] [--out FILE]

Lengths: FlexSP's wikipedia.txt, or a stand-in of its quantiles (published/lengths.py); 512 a batch, those over 384K
left out. Costs: FlexSP's coefficients for GPT-7B on 64 A100-40G (published/flexsp.py).

FlexSP        ZeRO-3, Ulysses all-to-all alone, degrees that are powers of two, as its cost model has them. SP64,
              BatchAda and "each" (the best degree of each micro-batch) as in published/flexsp.py; "groups": FlexSP's
              own problem, disjoint groups in sorted micro-batches, by `plugins.mesh.candidates.disjoint_groups`;
              "evenload": the mesh plugin. Certified bounds: "of any plan" (`plugins.mesh.bounds`), "of groups"
              (`disjoint_bound`, an integer program, given the same micro-batches).
Megatron      BalancedCPScheduler of the installed megatron-core on the same batches, cap 8,192 tokens a rank: busiest
              over mean rank in linear and quadratic compute, of which every group of its plan is a barrier; and the
              step simulated beside evenload's, launches left out, each sequence shared in the way predicted fastest.
large         1,024 ranks, 8,192 sequences, all cp_comm types; launches left out where ranks are not in step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.commands.tables.show import emit, grid
from evenload.core.costs.costs import rank_works
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.bounds import lower_bound_s
from evenload.plugins.mesh.candidates.disjoint_groups import Table, groups_of, seconds_of
from evenload.plugins.mesh.config import MeshConfig
from evenload.plugins.mesh.cost_table import CpStrategy, cost_table_of
from evenload.plugins.mesh.emit.micro_batches import common_strategy

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "published")]
import flexsp
from common import Batch, batches_of
from disjoint_bound import micro_batch_bound_s

MODEL = flexsp.MODELS[0]
CONTEXT = 384 * 1024
MEGATRON_CAP = 8192
LARGE = (1024, 8192)
ULYSSES = MeshConfig(engines=("all_to_all",), powers_of_two=True, remap="off", routed="off", offload="off")

Row = dict[str, Any]


def mesh_chain(num_ranks: int, cap: int, *, zero: bool, **mesh: Any) -> PlanChain:
    """The mesh plugin on FlexSP's machines, costs and model."""
    recipe = parse(
        {
            "trainer": "deepspeed" if zero else "megatron",
            "deepspeed": {"zero_stage": 3 if zero else 0},
            "model": {
                "family": "gpt",
                "num_layers": MODEL.layers,
                "hidden_size": MODEL.hidden,
                "num_attention_heads": MODEL.heads,
            },
            "parallel": {"dp": num_ranks},
            "train": {"dtype": "bf16", "global_batch_size": max(512, num_ranks)},
            "cluster": "flexsp-a100",
            "costs": MODEL.costs,
            "plugins": {"mesh": {"enabled": True, "max_tokens": cap, **mesh}},
        }
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    # What ZeRO-3 gathers is in the published coefficient of a launch; gradients are no matter of balance.
    traffic = replace(chain.context.traffic, gradient_bytes=0.0, weight_bytes=0.0)
    return replace(chain, context=replace(chain.context, traffic=traffic))


def launched_free(chain: PlanChain) -> PlanChain:
    """Without the coefficient of a launch, which is mostly what ZeRO-3 gathers."""
    costs = chain.context.costs
    free = {name: getattr(costs, name).model_copy(update={"launch_s": 0.0}) for name in ("forward", "backward")}
    return replace(chain, context=replace(chain.context, costs=costs.model_copy(update=free)))


def ulysses_chain() -> PlanChain:
    """As FlexSP has it, which knows nothing of the number of heads."""
    words = ULYSSES.model_dump(exclude={"enabled", "max_tokens"})
    chain = mesh_chain(flexsp.RANKS, flexsp.cap_of(MODEL), zero=True, **words)
    context = replace(chain.context, traffic=replace(chain.context.traffic, heads=0))
    limits = replace(chain.limits, heads=0, max_tokens=flexsp.cap_of(MODEL))
    return replace(chain, context=context, limits=limits)


def planned(chain: PlanChain, batch: Batch) -> tuple[StepPlan, float]:
    """A plan and the seconds of one core that it takes; the table of prices, made once a run, is left out."""
    plan, took = chain.plan(batch), []
    for _ in range(3):
        began = time.process_time()
        chain.plan(batch)
        took.append(time.process_time() - began)
    return plan, min(took)


def flexsp_row(batch: Batch, *, certify: bool) -> Row:
    """Seconds of one batch by every way to run it."""
    cuts = flexsp.cuts_of(MODEL, batch)
    row: Row = {
        "SP64": flexsp.static(MODEL, batch, cuts, (64,), each=False)[0],
        "BatchAda": flexsp.static(MODEL, batch, cuts, flexsp.DEGREES, each=False)[0],
        "each": flexsp.static(MODEL, batch, cuts, flexsp.DEGREES, each=True)[0],
    }
    chain = ulysses_chain()
    lengths = batch
    plan, row["plan_s"] = planned(chain, batch)
    outcome = simulate(plan, chain.context, record=False)
    row["evenload"], row["imbalance"] = outcome.step_s, _imbalance([plan], chain)
    row["bound"] = lower_bound_s(lengths, replace(chain.limits, whole_sequences=True), chain.context, ULYSSES)
    row |= groups_row(batch, chain, certify=certify)
    return row


def groups_row(batch: Batch, chain: PlanChain, *, certify: bool) -> Row:
    """FlexSP's problem: the best of the first numbers of sorted micro-batches, each in disjoint groups."""
    cap, lengths = chain.limits.max_tokens, batch
    cost_table = cost_table_of(chain.context, chain.limits, ULYSSES, int(lengths.max()))
    fewest = -(-int(lengths.sum()) // (flexsp.RANKS * cap))
    best: tuple[float, list[tuple[list[int], float]]] = (float("inf"), [])
    took = 0.0
    for count in range(fewest, fewest + flexsp.TRIES):
        parts, solved = flexsp.chunks(batch, count), []
        began = time.process_time()
        for part in parts:
            n = lengths[part]
            table = Table(cost_table.degrees, cost_table.of(n).seconds)
            groups = groups_of(n, table, flexsp.RANKS, cap, cost_table.node)
            if groups is None:
                break
            solved.append((part, float(seconds_of(groups, table).max())))
        took += time.process_time() - began
        if len(solved) == len(parts):
            best = min(best, (sum(s for _, s in solved) + len(parts) * cost_table.launch_s, solved))
    row: Row = {"groups": best[0], "groups_plan_s": took}
    if certify:
        bounds = []
        for part, known in best[1]:
            table = Table(cost_table.degrees, cost_table.of(lengths[part]).seconds)
            bounds.append(micro_batch_bound_s(lengths[part], table, flexsp.RANKS, cap, known) + cost_table.launch_s)
        row["groups_bound"] = sum(bounds)
    return row


def megatron_row(batch: Batch) -> Row:
    """Megatron's plan and ours of one batch."""
    chain = launched_free(mesh_chain(flexsp.RANKS, MEGATRON_CAP, zero=False))
    groups, theirs_s = balanced_cp(batch, flexsp.RANKS, MEGATRON_CAP)
    theirs = [plan_of(group, batch, chain) for group in groups]
    ours, ours_s = planned(chain, batch)
    return {
        "groups": len(groups),
        "launches": statistics.mean(sum(len(plan.of_rank(r)) for plan in theirs) for r in range(flexsp.RANKS)),
        "their_imbalance": _imbalance(theirs, chain),
        "our_imbalance": _imbalance([ours], chain),
        "their_s": sum(simulate(plan, chain.context, record=False).step_s for plan in theirs),
        "our_s": simulate(ours, chain.context, record=False).step_s,
        "their_plan_s": theirs_s,
        "our_plan_s": ours_s,
    }


def balanced_cp(batch: Batch, num_ranks: int, cap: int) -> tuple[list[list[list[int]]], float]:
    """Sequences of each rank in each group, by Megatron-Core's own scheduler, and the seconds that it takes."""
    from evenload.patches.cpu_bridge import bridge_cpu

    bridge_cpu()
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        """All that the scheduler asks of a process group."""

        def size(self) -> int:
            return num_ranks

    scheduler = BalancedCPScheduler(cap, Ranks())
    began = time.process_time()
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(batch.tolist())), None)
    return list(groups), time.process_time() - began


def plan_of(group: list[list[int]], batch: Batch, chain: PlanChain) -> StepPlan:
    """One of its groups as a plan: every sequence a micro-batch of its own on the ranks that have it."""
    order: dict[int, list[int]] = {}
    for rank, own in enumerate(group):
        for i in own:
            order.setdefault(i, []).append(rank)
    number = {i: k for k, i in enumerate(order)}
    cost_table = cost_table_of(chain.context, chain.limits, MeshConfig(), int(batch.max()))
    micro_batches = []
    for i, ranks in order.items():
        strategy = common_strategy([(int(batch[i]), tuple(ranks))], cost_table) if len(ranks) > 1 else CpStrategy("")
        assert strategy is not None
        piece = Slice(number[i], 0, int(batch[i]))
        micro_batches.append(
            MicroBatch((piece,), tuple(ranks), 0, strategy.cp_comm, strategy.ulysses_degree, routed=strategy.routed)
        )
    return StepPlan(batch[list(order)], tuple(micro_batches), chain.limits)


def _imbalance(plans: Iterable[StepPlan], chain: PlanChain) -> float:
    """Busiest over mean rank in compute, launches left out, where all ranks meet after each plan.

    Where they meet in every micro-batch (ZeRO-3), after each of these.
    """
    costs, most, mean = chain.context.costs, 0.0, 0.0
    for plan in plans:
        rows = [plan.of_rank(r) for r in range(plan.limits.num_ranks)]
        busy = np.zeros((max(map(len, rows)) if plan.limits.all_in_step else 1, len(rows)))
        place = {(r, i): k if plan.limits.all_in_step else 0 for r, row in enumerate(rows) for k, i in enumerate(row)}
        for i, m in enumerate(plan.micro_batches):
            for rank, work in rank_works(m).items():
                work = work._replace(launches=0)
                busy[place[rank, i], rank] += costs.forward.of(work) + costs.backward.of(work)
        most, mean = most + float(busy.max(axis=1).sum()), mean + float(busy.mean(axis=1).sum())
    return most / mean


def large_rows(lengths: list[int], quick: bool) -> list[Row]:
    """Planning a large plane, with ranks in step and without."""
    num_ranks, count = (128, 1024) if quick else LARGE
    rows = []
    for zero in (False, True):
        chain = mesh_chain(num_ranks, flexsp.cap_of(MODEL), zero=zero)
        chain = chain if zero else launched_free(chain)
        batch = as_lengths(np.resize(lengths, count))
        plan, plan_s = planned(chain, batch)
        step_s = simulate(plan, chain.context, record=False).step_s
        uncut = replace(plan.limits, whole_sequences=True)
        bound_s = lower_bound_s(np.resize(lengths, count), uncut, chain.context, MeshConfig())
        setting = f"{num_ranks} ranks, {count} sequences" + (", in step (ZeRO-3)" if zero else "")
        rows.append({"setting": setting, "plan_s": plan_s, "step_s": step_s, "over_bound": step_s / bound_s})
    return rows


def _means(rows: list[Row]) -> Row:
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0]}


def benchmark(file: Path | None, count: int, quick: bool) -> Row:
    label, batches = batches_of("wikipedia-like", 512, count, CONTEXT, file)
    padded = [as_lengths(-(-batch // flexsp.PAD) * flexsp.PAD) for batch in batches]
    return {
        "predicted": True,
        "lengths": label,
        "batches": [flexsp_row(batch, certify=True) for batch in padded],
        "megatron": [megatron_row(batch) for batch in batches],
        "large": large_rows(np.concatenate(list(batches)).tolist(), quick),
    }


def table(result: Row) -> Any:
    from rich.console import Group

    mean, many = _means(result["batches"]), len(result["batches"])
    names = {
        "SP64": "SP64",
        "BatchAda": "one degree a batch (BatchAda)",
        "each": "one degree a micro-batch",
        "groups": "disjoint groups",
        "evenload": "evenload",
        "groups_bound": "bound of disjoint groups",
        "bound": "bound of any plan",
    }
    rows = [
        (name, f"{mean[key]:.3f}", f"{mean[key] / mean['bound']:.3f}", f"{mean[key] / mean['evenload']:.2f}x")
        for key, name in names.items()
    ]
    about = (
        f"means of {many} batches, lengths {result['lengths']}; planning, measured: evenload "
        f"{seconds(mean['plan_s'])}, groups {seconds(mean['groups_plan_s'])}; "
        f"evenload's busiest rank over mean: {mean['imbalance']:.3f}"
    )
    first = grid("GPT-7B, 64 A100, ZeRO-3, Ulysses (predicted)", ("way", "s a step", "over bound", "ours"), rows, about)
    mean = _means(result["megatron"])
    rows = [
        (
            "Megatron BalancedCP",
            f"{mean['their_imbalance']:.3f}",
            f"{mean['their_s']:.3f}",
            seconds(mean["their_plan_s"]),
        ),
        ("evenload", f"{mean['our_imbalance']:.3f}", f"{mean['our_s']:.3f}", seconds(mean["our_plan_s"])),
    ]
    about = f"Megatron: {mean['groups']:.1f} groups, {mean['launches']:.0f} launches a rank, which are free here"
    head = ("scheduler", "busiest / mean rank", "s a step", "planning")
    second = grid("64 ranks, 8,192 tokens a rank (predicted)", head, rows, about)
    rows = [
        (r["setting"], seconds(r["plan_s"]), f"{r['step_s']:.3f}", f"{r['over_bound']:.3f}") for r in result["large"]
    ]
    third = grid(
        "large planes (planning measured, the rest predicted)",
        ("setting", "planning", "s a step", "over bound"),
        rows,
        "",
    )
    return Group(first, second, third)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", type=Path, help="FlexSP's wikipedia.txt, or any other lengths; default: a stand-in."
    )
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="One batch, and a smaller plane.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the tables.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    arguments = parser.parse_args()
    result = benchmark(arguments.lengths, 1 if arguments.quick else arguments.batches, arguments.quick)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, arguments.json, table)


if __name__ == "__main__":
    main()
