"""What two stages on each device, in a V, gain on ragged lengths at equal memory. Predicted; planning measured.

    python benchmarks/peers/v_shape.py [--wikipedia FILE] [--mooncake FILE] [--quick] [--json] [--out FILE]

The pipeline plugin without and with ``v_shape`` (ZBV's placement; Qi et al., arXiv 2405.15362) on the same model, under
the same cap on what passes hold. Layers are those of `pipelines`, raised to the next number that twice the devices
divide. A stage of a V has half the layers, so half the compute, TP traffic and launch ("half"), as the cost model has
it; "whole" gives each of its stages a launch of the size of two of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from evenload.benchmarks.frame import Row, main, options
from evenload.benchmarks.peers.pipelines import TOKENS, Batch, batch_of, bodies_of, pipeline_chain, planned
from evenload.benchmarks.published.common import MODELS
from evenload.commands.tables.show import grid
from evenload.core.errors import EvenloadError
from evenload.core.input.format import seconds
from evenload.core.planning.chain import PlanChain

ROWS = (("wiki", 8, 1, 64), ("wiki", 4, 1, 64), ("wiki", 4, 2, 64), ("wiki", 16, 1, 64), ("mooncake", 8, 1, 32))
"""Lengths, devices of a pipeline, data-parallel ranks, sequences of all ranks."""
CAPS_GIB = (8, 16, 32, 0)
"""What passes may hold; 0: what the device leaves."""
LAUNCHES = {"half": 1.0, "whole": 2.0}
"""Launches of a stage of a V, over those of half as many layers."""


def with_launch(chain: PlanChain, times: float) -> PlanChain:
    """The chain whose passes launch so many times as long."""
    costs = chain.context.costs
    changed = {name: getattr(costs, name).scaled(1.0, times) for name in ("forward", "backward")}
    return replace(chain, context=replace(chain.context, costs=costs.model_copy(update=changed)))


def outcome(chain: PlanChain, lengths: Batch) -> Row:
    """What a chain makes of a batch; its refusal where it has no plan."""
    try:
        plan, simulated, plan_s = planned(chain, lengths)
    except EvenloadError as error:
        return {"refused": str(error).splitlines()[0]}
    held_bytes = float(simulated.activation_bytes.max())
    figures = {"step_s": simulated.step_s, "held_bytes": held_bytes, "micro_batches": len(plan.micro_batches)}
    return figures | {"plan_s": plan_s, "bound_s": plan.bound_s}


def row_of(label: str, lengths: Batch, devices: int, ranks: int, cap_gib: float) -> Row:
    words: Row = {"activation_gib": cap_gib} if cap_gib else {}
    layers = MODELS["llama-70b" if devices == 16 else "llama-13b"]["num_layers"]
    model = {"num_layers": -(-layers // (2 * devices)) * 2 * devices}

    def chain(**more: bool) -> PlanChain:
        return pipeline_chain(devices, ranks, len(lengths), 2 * TOKENS, model, **words, **more)

    v = {name: outcome(with_launch(chain(v_shape=True), times), lengths) for name, times in LAUNCHES.items()}
    row = {"lengths": label, "devices": devices, "ranks": ranks, "sequences": len(lengths), "cap_gib": cap_gib}
    return {**row, **model, "plain": outcome(chain(), lengths), **v}


def benchmark(asked: Any) -> Row:
    bodies = bodies_of(asked.wikipedia, asked.mooncake)
    rows = [
        row_of(bodies[name][0], batch_of(bodies[name][1], count), devices, ranks, cap_gib)
        for name, devices, ranks, count in (ROWS[:1] if asked.quick else ROWS)
        for cap_gib in (CAPS_GIB[1:2] if asked.quick else CAPS_GIB)
    ]
    return {"predicted": True, "rows": rows}


def table(result: Row) -> Any:
    def shown(row: Row, name: str) -> str:
        one, plain = row[name], row["plain"]
        if "refused" in one:
            return "none fits"
        gain = f" ({one['step_s'] / plain['step_s'] - 1:+.1%})" if "step_s" in plain and one is not plain else ""
        about = f"{one['held_bytes'] / 1e9:.0f} GB, {one['micro_batches']} chunks, {seconds(one['plan_s'])}"
        return f"{one['step_s']:.4f} s{gain}, {about}"

    rows = [
        (
            r["lengths"],
            f"PP {r['devices']} x DP {r['ranks']}, {r['sequences']}, {r['num_layers']} layers",
            f"{r['cap_gib']:g} GiB" if r["cap_gib"] else "device",
            *(shown(r, name) for name in ("plain", *LAUNCHES)),
        )
        for r in result["rows"]
    ]
    head = ("lengths", "layout, sequences", "cap", "evenload", "V, half a launch a stage", "V, a whole one")
    return grid("Two stages on each device (predicted; planning measured)", head, rows, "H200, TP 8")


if __name__ == "__main__":
    main(options(__doc__, wikipedia=Path, mooncake=Path, quick=False), benchmark, table)
