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
              step simulated next to evenload's, launches left out, each sequence shared in the way predicted fastest.
large         1,024 ranks, 8,192 sequences, all cp_comm types; launches left out where ranks are not in step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.benchmarks.chains import chain_of, plugins, with_launches, with_traffic, without_sums
from evenload.benchmarks.frame import Row, columns, main, means, options, timed
from evenload.benchmarks.planning.disjoint_bound import micro_batch_bound_s
from evenload.benchmarks.published import flexsp
from evenload.benchmarks.published.common import Batch, batches_of
from evenload.core.costs.costs import rank_works
from evenload.core.input.format import seconds
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.simulate.step import simulate
from evenload.plugins.mesh.bounds import lower_bound_s
from evenload.plugins.mesh.candidates.disjoint_groups import Table, groups_of, seconds_of
from evenload.plugins.mesh.config import MeshConfig
from evenload.plugins.mesh.cost_table import CpStrategy, cost_table_of
from evenload.plugins.mesh.emit.micro_batches import common_strategy
from rich.console import Group

MODEL = flexsp.MODELS[0]
CONTEXT = 384 * 1024
MEGATRON_CAP = 8192
LARGE = (1024, 8192)
NAMES = {
    "SP64": "SP64",
    "BatchAda": "one degree a batch (BatchAda)",
    "each": "one degree a micro-batch",
    "groups": "disjoint groups",
    "evenload": "evenload",
    "groups_bound": "bound of disjoint groups",
    "bound": "bound of any plan",
}


def mesh_chain(num_ranks: int, cap: int, *, zero: bool, **mesh: Any) -> PlanChain:
    """The mesh plugin on FlexSP's machines, costs and model."""
    sizes = {"num_layers": MODEL.layers, "hidden_size": MODEL.hidden, "num_attention_heads": MODEL.heads}
    chain = chain_of(
        {
            "trainer": "deepspeed" if zero else "megatron",
            "deepspeed": {"zero_stage": 3 if zero else 0},
            "model": {"family": "gpt", **sizes},
            "parallel": {"dp": num_ranks},
            "train": {"dtype": "bf16", "global_batch_size": max(512, num_ranks)},
            "cluster": "flexsp-a100",
            "costs": MODEL.costs,
            "plugins": plugins(cap, "mesh", **mesh),
        }
    )
    # What ZeRO-3 gathers is in the published coefficient of a launch; gradients are no matter of balance.
    return without_sums(chain)


def launched_free(chain: PlanChain) -> PlanChain:
    """Without the coefficient of a launch, which is mostly what ZeRO-3 gathers."""
    return replace(chain, context=with_launches(chain.context, lambda *_: 0.0))


def ulysses_chain() -> PlanChain:
    """As FlexSP has it, which knows nothing of the number of heads."""
    words, cap = flexsp.ULYSSES.model_dump(exclude={"enabled", "max_tokens"}), flexsp.cap_of(MODEL)
    chain = with_traffic(mesh_chain(flexsp.RANKS, cap, zero=True, **words), heads=0)
    return replace(chain, limits=replace(chain.limits, heads=0, max_tokens=cap))


def planned(chain: PlanChain, batch: Batch) -> tuple[StepPlan, float]:
    """A plan and the seconds of one core that it takes; the table of prices, made once a run, is left out."""
    chain.plan(batch)
    return timed(lambda: chain.plan(batch))


def flexsp_row(batch: Batch) -> Row:
    """Seconds of one batch by every way to run it."""
    cuts = flexsp.cuts_of(MODEL, batch)
    row: Row = {
        "SP64": flexsp.static(MODEL, batch, cuts, (64,), each=False)[0],
        "BatchAda": flexsp.static(MODEL, batch, cuts, flexsp.DEGREES, each=False)[0],
        "each": flexsp.static(MODEL, batch, cuts, flexsp.DEGREES, each=True)[0],
    }
    chain = ulysses_chain()
    plan, row["plan_s"] = planned(chain, batch)
    row["evenload"] = simulate(plan, chain.context, record=False).step_s
    row["imbalance"] = _imbalance([plan], chain)
    row["bound"] = lower_bound_s(batch, replace(chain.limits, whole_sequences=True), chain.context, flexsp.ULYSSES)
    return row | groups_row(batch, chain)


def groups_row(batch: Batch, chain: PlanChain) -> Row:
    """FlexSP's problem: the best of the first numbers of sorted micro-batches, each in disjoint groups; its bound."""
    cap = chain.limits.max_tokens
    cost_table = cost_table_of(chain.context, chain.limits, flexsp.ULYSSES, int(batch.max()))
    fewest = -(-int(batch.sum()) // (flexsp.RANKS * cap))
    best: tuple[float, list[tuple[Batch, Table, float]]] = (float("inf"), [])
    took_s = 0.0
    for count in range(fewest, fewest + flexsp.TRIES):
        parts, solved = flexsp.chunks(batch, count), []
        began_s = time.process_time()
        for part in parts:
            table = Table(cost_table.degrees, cost_table.of(batch[part]).seconds)
            groups = groups_of(batch[part], table, flexsp.RANKS, cap, cost_table.node)
            if groups is None:
                break
            solved.append((batch[part], table, float(seconds_of(groups, table).max())))
        took_s += time.process_time() - began_s
        if len(solved) == len(parts):
            step_s = sum(known_s for *_, known_s in solved) + len(parts) * cost_table.launch_s
            best = min(best, (step_s, solved), key=lambda one: one[0])
    bounds = (micro_batch_bound_s(n, table, flexsp.RANKS, cap, known_s) for n, table, known_s in best[1])
    bound_s = sum(bounds) + len(best[1]) * cost_table.launch_s
    return {"groups": best[0], "groups_plan_s": took_s, "groups_bound": bound_s}


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


def benchmark(asked: Any) -> Row:
    count = 1 if asked.quick else asked.batches
    label, batches = batches_of("wikipedia-like", 512, count, CONTEXT, asked.lengths)
    return {
        "predicted": True,
        "lengths": label,
        "batches": [flexsp_row(as_lengths(-(-batch // flexsp.PAD) * flexsp.PAD)) for batch in batches],
        "megatron": [megatron_row(batch) for batch in batches],
        "large": large_rows(np.concatenate(list(batches)).tolist(), asked.quick),
    }


def table(result: Row) -> Any:
    mean, many = means(result["batches"]), len(result["batches"])
    rows = [
        {"way": name, "s": mean[key], "over": mean[key] / mean["bound"], "ours": mean[key] / mean["evenload"]}
        for key, name in NAMES.items()
    ]
    planning = f"evenload {seconds(mean['plan_s'])}, groups {seconds(mean['groups_plan_s'])}"
    about = f"means of {many} batches, lengths {result['lengths']}; planning, measured: {planning}; "
    about += f"evenload's busiest rank over mean: {mean['imbalance']:.3f}"
    cells = {"way": "{way}", "s a step": "{s:.3f}", "over bound": "{over:.3f}", "ours": "{ours:.2f}x"}
    first = columns("GPT-7B, 64 A100, ZeRO-3, Ulysses (predicted)", rows, cells, about)
    mean = means(result["megatron"])
    rows = [
        {"name": name, **{key: mean[f"{whose}_{key}"] for key in ("imbalance", "s", "plan_s")}}
        for name, whose in (("Megatron BalancedCP", "their"), ("evenload", "our"))
    ]
    about = f"Megatron: {mean['groups']:.1f} groups, {mean['launches']:.0f} launches a rank, which are free here"
    cells = {"scheduler": "{name}", "busiest / mean rank": "{imbalance:.3f}", "s a step": "{s:.3f}"}
    cells |= {"planning": "{plan_s:seconds}"}
    second = columns("64 ranks, 8,192 tokens a rank (predicted)", rows, cells, about)
    cells = {"setting": "{setting}", "planning": "{plan_s:seconds}", "s a step": "{step_s:.3f}"}
    cells |= {"over bound": "{over_bound:.3f}"}
    return Group(first, second, columns("large planes (planning measured, the rest predicted)", result["large"], cells))


if __name__ == "__main__":
    main(options(__doc__, lengths=Path, batches=8, quick=False), benchmark, table)
