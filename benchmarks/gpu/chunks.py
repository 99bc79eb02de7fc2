"""Chunks of one pipeline stage on one GPU, none, some or all layers recomputed: predicted against measured.

    python benchmarks/gpu/chunks.py [--json] [--tokens 32768] [--chunks 8] [--limit seconds] [--tiny]

Eight layers of a llama of hidden size 3,072 with their embedding and output layer, in bf16 through Megatron-Core: one
long sequence in chunks of equally many tokens, packs of short ones next to it, in the order of the first of four stages
(three slots of forwards ahead). Rows: layers that every chunk recomputes (none, half, all), and "graded": the more, the
longer a chunk waits for its backward.

    predicted    `core.simulate.step` and `core.costs.memory` with costs that the parts of `evenload profile` find here
                 before, on shapes that are not among the rows, nothing recomputed
    measured     seconds of a step, update included: median of the runs by the wall; peak beyond weights and optimizer
                 states by the allocator's books (`runtime.measure.memory`)
    grad norm    relative difference to the first row's; recomputation changes nothing but rounding

``--limit`` starts nothing new after so many seconds. ``--tiny`` tries all of it out without a GPU.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from evenload.benchmarks.frame import Row, options, show
from evenload.benchmarks.gpu.card import asked_for, attempted, wall_s, with_failures
from evenload.core.costs.context import PlanningContext
from evenload.core.costs.costs import Costs
from evenload.core.costs.memory import peak_activation_bytes
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.order import in_slots
from evenload.core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting, limits_of, stage_costs
from evenload.core.recipe.recipe import Recipe, parse
from evenload.core.simulate.step import simulate
from evenload.patches import bridge_cpu
from evenload.runtime.measure.memory import Levels
from evenload.runtime.watchdog.watchdog import Watchdog
from evenload.runtime.world.world import World, close_world, init_world
from evenload.training.job import Job
from evenload.training.profiling.cases import Case
from evenload.training.profiling.memory import measure_memory, random_tokens
from evenload.training.verbs.profile import fit_samples, machine, measure

AHEAD = 3
"""Slots of forwards that the first of four stages runs ahead."""
PACKS, SHORT = 4, 4
"""Packs of short sequences, and sequences in each."""
RUNS = 3


class Shape(NamedTuple):
    """The model and its batch."""

    tokens: int
    chunks: int
    layers: int = 8
    hidden: int = 3072
    heads: int = 24
    groups: int = 8
    vocabulary: int = 32768
    dtype: str = "bf16"

    @property
    def chunk(self) -> int:
        """Tokens of one."""
        return self.tokens // self.chunks

    @property
    def recipe(self) -> Recipe:
        heads = {"num_attention_heads": self.heads, "num_query_groups": self.groups, "vocab_size": self.vocabulary}
        return parse(
            {
                "model": {"num_layers": self.layers, "hidden_size": self.hidden, **heads},
                "data": {"max_length": self.tokens},
                "parallel": {"dp": 1},
                "train": {"dtype": self.dtype, "global_batch_size": 1 + PACKS * SHORT},
            }
        )

    def plan(self, limits: Limits) -> StepPlan:
        """The chunks, longest sequence first, in the order of a stage that runs ahead."""
        borders = [self.tokens * i // self.chunks for i in range(self.chunks + 1)]
        micro_batches = [MicroBatch((Slice(0, a, b),), (0,)) for a, b in pairwise(borders)]
        short = self.chunk // SHORT
        for pack in range(PACKS):
            pieces = (Slice(1 + pack * SHORT + i, 0, short) for i in range(SHORT))
            micro_batches.append(MicroBatch(tuple(pieces), (0,)))
        last = self.chunks - 1
        backward = [*reversed(range(self.chunks)), *range(self.chunks, len(micro_batches))]
        order = in_slots(
            range(len(micro_batches)), backward, [max(last, place) + 1 for place in range(len(micro_batches))], AHEAD
        )
        batch = as_lengths([self.tokens, *[short] * (PACKS * SHORT)])
        return check(StepPlan(batch, tuple(micro_batches), replace(limits, max_tokens=self.chunk + 1), (tuple(order),)))

    def recomputed(self, plan: StepPlan) -> Iterator[tuple[str, StepPlan]]:
        """The plan with every choice of layers to recompute."""
        count = len(plan.micro_batches)
        for layers in (0, self.layers // 2, self.layers):
            yield f"{layers} of {self.layers}", check(replace(plan, recompute=((layers,) * count,)))
        waits = [self.layers * (self.chunks - i) // self.chunks for i in range(self.chunks)]
        yield "graded", check(replace(plan, recompute=((*waits, *[0] * PACKS),)))

    def cases(self) -> list[Case]:
        """Shapes to fit costs on, little work first."""
        n = self.chunk
        whole = [Case(1, n // 4), Case(4, n // 4), Case(1, n, count=2), Case(1, 2 * n)]
        return [*whole, Case(1, 4 * n, cuts=4), Case(2, 2 * n, cuts=2)]


def costs_here(job: Job, shape: Shape) -> Costs:
    """Costs of the model on this device, nothing recomputed."""
    memory = measure_memory(job, shape.chunk)
    waiting = job.world.device.type == "cuda" or torch.get_num_threads() > 1
    # The first of each shape pays for kernels that are chosen then.
    measure(job, shape.cases())
    fitted = fit_samples(measure(job, shape.cases()), job.chain.context, waiting_counts=waiting)
    return Costs(
        source="measured here",
        forward=fitted.forward,
        backward=fitted.backward,
        memory=memory,
        num_layers=shape.layers,
        update_s=fitted.update_s,
    )


def row_of(plan: StepPlan, job: Job, context: PlanningContext) -> Row:
    """One plan, predicted and measured."""
    predicted = {
        "predicted_s": simulate(plan, context, record=False).step_s,
        "predicted_bytes": max(peak_activation_bytes(plan, 0, 0)[0], context.costs.memory.update_bytes),
    }
    tokens_of, device = random_tokens(job.recipe), job.world.device
    job.host.train_step(plan, tokens_of, lr=0.0)
    gc.collect()
    with Levels(device) as levels:
        result = job.host.train_step(plan, tokens_of, lr=0.0)
    peak = levels.read()[1]
    measured_s = wall_s(lambda: job.host.train_step(plan, tokens_of, lr=0.0), device, RUNS)
    measured = {"measured_s": measured_s, "measured_bytes": peak}
    return {**predicted, **measured, "loss": result.loss, "grad_norm": result.grad_norm}


def benchmark(shape: Shape, world: World, limit_s: float) -> Row:
    """A row for each choice of layers; one that memory or time does not allow has ``failed``."""
    from evenload.integrations.megatron import open_host

    until = time.monotonic() + limit_s
    recipe, source = shape.recipe, None
    host = open_host(recipe, world)
    rows: list[Row] = []
    with Watchdog() as watchdog:
        chain = PlanChain.of_recipe(recipe, recipe.layout(world.size))
        job = Job(recipe, world, host, chain, watchdog, source)  # type: ignore[arg-type]  # tokens are random
        costs = costs_here(job, shape)
        context = replace(chain.context, costs=stage_costs(Setting.of_recipe(recipe), costs, chain.context.layout))
        for name, plan in shape.recomputed(shape.plan(limits_of(Setting.of_recipe(recipe), context))):
            watchdog.at(f"recomputing {name}")
            rows.append(attempted({"recomputed": name}, partial(row_of, plan, job, context), until))
    host.close()
    ran = [row for row in rows if "failed" not in row]
    for row in ran:
        row["time_error"] = row["predicted_s"] / row["measured_s"] - 1
        row["bytes_error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
        row["grad_norm_rel_diff"] = abs(row["grad_norm"] / ran[0]["grad_norm"] - 1)
    where = {"device": machine(world.device), "torch": torch.__version__, "shape": shape._asdict()}
    return {**where, "costs": costs.model_dump(exclude_none=True), "rows": rows}


def table(result: Row) -> Any:
    cells = {
        "recomputed": "{recomputed}",
        "step s, predicted": "{predicted_s:.3f}",
        "step s, measured": "{measured_s:.3f}",
        "step error": "{time_error:+.1%}",
        "MiB, predicted": lambda row: f"{row['predicted_bytes'] / 2**20:.1f}",
        "MiB, measured": lambda row: f"{row['measured_bytes'] / 2**20:.1f}",
        "MiB error": "{bytes_error:+.1%}",
        "grad norm": "{grad_norm_rel_diff:.1e}",
    }
    shape = Shape(**result["shape"])
    title = (
        f"a stage of {shape.layers} layers on {result['device']}, torch {result['torch']}: "
        f"{shape.tokens} tokens in {shape.chunks} chunks, {PACKS} packs of short ones"
    )
    return with_failures(title, result["rows"], cells)


def measured(asked: Any) -> Row:
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed|torch)\.")
    bridge_cpu()
    shape = Shape(asked.tokens, asked.chunks)
    if asked.tiny:
        shape = shape._replace(layers=2, hidden=64, heads=4, groups=2, vocabulary=256, dtype="fp32")
    world = init_world()
    result = benchmark(shape, world, asked.limit)
    close_world(world)
    return result


if __name__ == "__main__":
    asked = asked_for(options(__doc__, tokens=32768, chunks=8, limit=float("inf"), tiny=False))
    show(measured(asked), asked, table)
