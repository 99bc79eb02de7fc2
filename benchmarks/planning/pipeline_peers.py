"""Pipelines beside other people's schedules: sequences of one length, and ragged ones. Predicted; planning measured.

    python benchmarks/planning/pipeline_peers.py [--lengths FILE ...] [--quick] [--json] [--out FILE]

alike    N sequences of 8,192 tokens, LLaMA 13B (PP 4, 8) and 70B (PP 16) with TP 8 on H200s. Neither hand-overs nor an
         output layer take time, so that all play one game: a forward, a backward and weight gradients (W) apart, and a
         launch for each forward and backward of any part of a stage. Bubble: the share of a step beyond N sequences of
         one launch each. "held": the most activations at any stage, in sequences.
ragged   one step of ``--lengths`` (each a file; default a stand-in for Wikipedia) on PP 8 x TP 8 and what is listed,
         with hand-overs, output layer and TP traffic. "over busiest": the step over compute and TP traffic of the
         busiest stage.

    evenload          the pipeline plugin with the device's memory
    tight             the same with what ZBV holds for its activations: P sequences
    whole             the same with sequences that stay whole, the game of ZB-2p (Qi et al., arXiv 2401.10241)
    Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV
                      the schedules of the installed torch, two parts of a stage on each rank (torch.distributed
                      .pipelining), every part a launch of its own
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from evenload.api import load_plugins
from evenload.commands.tables.show import emit, grid
from evenload.core.input.format import GIB, seconds
from evenload.core.plan.step_plan import StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.core.simulate.step import Simulation, simulate
from evenload.data.lengths import read_lengths
from evenload.data.samples.cut import cut
from evenload.data.samples.order import SampleOrder

sys.path.append(str(Path(__file__).parents[1] / "published"))
from common import MODELS, Batch
from lengths import corpus

TOKENS = 8192
LAUNCHES_S = (0.0, 0.25e-3, 0.5e-3, 1e-3)
UNIFORM = ((4, 16), (8, 16), (16, 32))
"""Stages, sequences."""
RAGGED = ((8, 1, 64), (8, 1, 32), (4, 2, 64), (16, 1, 64))
"""Stages, data-parallel ranks, sequences a rank."""
LONGEST = 1 << 17
SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PARTS = 2
KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}

Row = dict[str, Any]
Pass = tuple[str, int, int]
"""Kind (F, W; I: a backward without its weight gradients, B: with them), part of the model, micro-batch."""


def chain_of(stages: int, ranks: int, samples: int, cap: int, **pipeline: Any) -> PlanChain:
    """The pipeline plugin on H200s with tensor parallelism of a node, gradient sums left out."""
    load_plugins()
    recipe = parse(
        {
            "model": {"vocab_size": 32000, **MODELS["llama-70b" if stages == 16 else "llama-13b"]},
            "parallel": {"pp": stages, "dp": ranks, "tp": 8},
            "train": {"dtype": "bf16", "global_batch_size": samples * ranks},
            "cluster": "h200",
            "plugins": {"pipeline": {"enabled": True, "max_tokens": cap, **pipeline}},
        }
    )
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    traffic = replace(chain.context.traffic, gradient_bytes=0.0, weight_bytes=0.0)
    return replace(chain, context=replace(chain.context, traffic=traffic))


def alone(chain: PlanChain, launch_s: float) -> PlanChain:
    """Without hand-overs, TP traffic and output layer, and with this launch: compute and waits are all there is."""
    context, limits = chain.context, chain.limits
    link = context.cluster.intra.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e18})
    launched = {n: getattr(context.costs, n).model_copy(update={"launch_s": launch_s}) for n in ("forward", "backward")}
    context = replace(
        context,
        costs=context.costs.model_copy(update=launched),
        cluster=context.cluster.model_copy(update={"intra": link, "inter": link}),
        traffic=replace(context.traffic, state_bytes_per_token=1e-9),
        head_frac=0.0,
    )
    headless = limits.memory.model_copy(update={"head_bytes_per_token": 0.0, "head_working_bytes_per_token": 0.0})
    return replace(chain, context=context, limits=replace(limits, memory=headless, splits_backward=True))


def planned(chain: PlanChain, batch: Batch) -> tuple[StepPlan, Simulation, float]:
    """A plan, what it comes to, and the seconds of one core that it takes: the least of three."""
    took = []
    for _ in range(3):
        began = time.process_time()
        plan = chain.plan(batch)
        took.append(time.process_time() - began)
    return plan, simulate(plan, chain.context, record=False), min(took)


def uniform_row(stages: int, count: int, launch_s: float) -> Row:
    """The bubble and what is held, by way."""
    batch = as_lengths(np.full(count, TOKENS))
    chain = alone(chain_of(stages, 1, count, TOKENS), launch_s)
    costs, one_bytes = chain.context.costs, chain.limits.memory.activation_bytes_per_token * TOKENS
    forward_s, both_s = (float(cost.seconds(TOKENS)) + cost.launch_s for cost in (costs.forward, costs.backward))
    weights_s = float(costs.weights_s(TOKENS))
    ideal_s = count * (forward_s + both_s)
    tight = alone(chain_of(stages, 1, count, TOKENS, activation_gib=stages * one_bytes / GIB), launch_s)
    whole = alone(chain_of(stages, 1, count, TOKENS, chunks=1), launch_s)
    bubbles: Row = {}
    for name, of in (("evenload", chain), ("tight", tight), ("whole", whole)):
        _, outcome, plan_s = planned(of, batch)
        held = float(outcome.activation_bytes.max()) / one_bytes
        bubbles[name] = {"bubble": 1 - ideal_s / outcome.step_s, "held": held, "plan_s": plan_s}
    for name in SCHEDULES:
        rows = schedule(name, stages, count)
        end_s, held = played(rows, stages, (forward_s, both_s - weights_s, weights_s), launch_s)
        bubbles[name] = {"bubble": 1 - ideal_s / end_s, "held": held}
    return {"stages": stages, "sequences": count, "launch_s": launch_s, "bubbles": bubbles}


def schedule(name: str, stages: int, count: int) -> list[list[list[Pass]]]:
    """The passes of every rank by torch's own schedule; those of one entry run one after the other."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    def passes(action: Any) -> list[Pass]:
        each = getattr(action, "sub_actions", None) or (action,)
        named = [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in each]
        return [(KINDS[kind], part, number) for kind, part, number in named if kind in KINDS]

    rows = get_schedule_ops(name, stages, count, num_stages_per_rank=PARTS)
    return [[entry for action in row if action is not None and (entry := passes(action))] for row in rows]


def played(
    rows: list[list[list[Pass]]], stages: int, pass_s: tuple[float, float, float], launch_s: float
) -> tuple[float, float]:
    """When the last rank ends [s], and the most parts in flight on any, in whole stages. ``pass_s``: forward, backward
    without weight gradients and these, of a whole stage; every part launches forward and backward anew."""
    f, i, w = pass_s
    each = {"F": (f - launch_s) / PARTS + launch_s, "I": (i - launch_s) / PARTS + launch_s, "W": w / PARTS}
    each["B"] = each["I"] + each["W"]
    done: dict[Pass, float] = {}
    at, now, live, held = [0] * len(rows), [0.0] * len(rows), [0] * len(rows), 0
    left = sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                entry = row[at[rank]]
                needs = {need for one in entry for need in _needs(one, PARTS * stages)} - {_finished(e) for e in entry}
                if not needs <= done.keys():
                    break
                now[rank] = max([now[rank], *(done[need] for need in needs)])
                for one in entry:
                    now[rank] += each[one[0]]
                    done[_finished(one)] = now[rank]
                    live[rank] += {"F": 1, "I": 0}.get(one[0], -1)
                    held = max(held, live[rank])
                at[rank], left = at[rank] + 1, left - 1
        assert left < before, "a schedule that stops"
    return max(now), held / PARTS


def _needs(one: Pass, parts: int) -> Iterator[Pass]:
    kind, part, number = one
    if kind == "F" and part:
        yield "F", part - 1, number
    if kind in "IB":
        yield "F", part, number
        if part < parts - 1:
            yield "I", part + 1, number
    if kind == "W":
        yield "I", part, number


def _finished(one: Pass) -> Pass:
    return ("I", *one[1:]) if one[0] == "B" else one


def ragged_row(label: str, lengths: Batch, stages: int, ranks: int, samples: int) -> Row:
    chain = chain_of(stages, ranks, samples, 2 * TOKENS)
    plan, outcome, plan_s = planned(chain, lengths)
    busiest_s = float((outcome.busy_s + outcome.exposed_s).max())
    row = {"lengths": label, "stages": stages, "ranks": ranks, "sequences": len(lengths), "plan_s": plan_s}
    row |= {"step_s": outcome.step_s, "over_busiest": outcome.step_s / busiest_s, "bubble": outcome.bubble_frac}
    return row | {"peak_bytes": float(outcome.peak_bytes.max()), "micro_batches": len(plan.micro_batches)}


def batch_of(file: Path | None, count: int) -> tuple[str, Batch]:
    """What stands in, and the first step of ``count`` samples, drawn as training draws them."""
    body = read_lengths(file) if file else corpus("wikipedia-like", 4096, LONGEST)[1]
    body = cut(body, LONGEST, "split", 2).length
    drawn, _ = SampleOrder(len(body), 1234).take(count)
    return file.stem if file else "wikipedia-like", as_lengths(body[drawn])


def benchmark(files: list[Path], quick: bool) -> Row:
    sizes, launches_s = UNIFORM[: 1 if quick else 3], LAUNCHES_S[2 if quick else 0 :]
    uniform = [(*size, launch_s) for size in sizes for launch_s in launches_s]
    ragged = [
        ragged_row(*batch_of(file, ranks * samples), stages, ranks, samples)
        for file in files or [None]
        for stages, ranks, samples in RAGGED[: 1 if quick else 4]
    ]
    return {"predicted": True, "uniform": [uniform_row(*size) for size in uniform], "ragged": ragged}


def table(result: Row) -> Any:
    from rich.console import Group

    names = list(result["uniform"][0]["bubbles"])
    rows = [
        (
            f"PP {r['stages']}, {r['sequences']}",
            f"{1e3 * r['launch_s']:g} ms",
            *(f"{r['bubbles'][n]['bubble']:.1%} ({r['bubbles'][n]['held']:.1f})" for n in names),
            seconds(r["bubbles"]["evenload"]["plan_s"]),
        )
        for r in result["uniform"]
    ]
    about = "bubble (sequences held); planning measured"
    first = grid("One length, H200 (predicted)", ("stages, sequences", "launch", *names, "planning"), rows, about)
    rows = [
        (
            r["lengths"],
            f"PP {r['stages']} x DP {r['ranks']}, {r['sequences']}",
            f"{r['step_s']:.4f}",
            f"{r['over_busiest']:.3f}",
            f"{r['peak_bytes'] / 1e9:.0f}",
            f"{r['micro_batches']}",
            seconds(r["plan_s"]),
        )
        for r in result["ragged"]
    ]
    head = ("lengths", "layout, sequences", "s a step", "over busiest", "peak GB", "chunks", "planning")
    return Group(first, grid("Ragged lengths, TP 8, H200 (predicted)", head, rows, "planning measured"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="*", default=[], help="Files of lengths; default: a stand-in.")
    parser.add_argument("--quick", action="store_true", help="Few rows.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the tables.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    arguments = parser.parse_args()
    result = benchmark(arguments.lengths, arguments.quick)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, arguments.json, table)


if __name__ == "__main__":
    main()
