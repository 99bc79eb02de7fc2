"""Peak activation memory of one long sequence through Megatron-Core: whole, recomputed, and in slices.

    python benchmarks/memory/memory.py [--tokens 65536] [--slices 16] [--keep 1] [--layers 2] [--hidden 64] [--heads 4]
                                [--groups 1] [--dtype fp32] [--threads 1] [--json] [--out FILE]
    python benchmarks/memory/memory.py --plans [--only TEXT] [--json] [--out FILE]     (small plans: memory_plans.py)

    whole            one forward and one backward, every activation kept
    recomputed       the same with train.recompute: Megatron's full activation checkpointing
    sliced           slices of equal length; every slice's activations wait for its backward
    sliced, replayed only those of the last --keep slices do, the others run forward a second time (ChunkFlow's rule)

Peak: the most that forward and backward hold at once beyond weights and gradient buffers (`runtime.measure.memory`:
tracked storages on a CPU, the allocator's own level on CUDA). "predicted" is `core.costs.memory`'s model with what
`evenload profile` measures on short sequences. Seconds are wall time on CUDA and the process's own CPU
time elsewhere, with the time that tracking takes. Gradient error: the largest over parameters of ||g - ref|| / ||ref||,
ref being those of the first variant that ran, usually the whole sequence.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from evenload.benchmarks.chains import recipe_of
from evenload.benchmarks.frame import Row, columns, main, options
from evenload.benchmarks.memory import memory_plans
from evenload.core.costs.memory import peak_activation_bytes
from evenload.core.input.format import seconds
from evenload.core.laws import check
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.recipe.recipe import Recipe
from evenload.patches import bridge_cpu
from evenload.runtime.measure.memory import Levels
from evenload.runtime.world.world import World, close_world, init_world
from evenload.training.verbs.profile import machine

WHOLE, RECOMPUTED, SLICED, REPLAYED = "whole", "recomputed", "sliced", "sliced, replayed"
VARIANTS = (WHOLE, RECOMPUTED, SLICED, REPLAYED)

SIZES = ("tokens", "slices", "keep", "layers", "hidden", "heads", "groups", "vocabulary")
Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The model, the sequence and how it is cut."""

    tokens: int = 65536
    slices: int = 16
    keep: int = 1
    """Slices whose activations are kept where the others are replayed."""
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    groups: int = 1
    ffn: int | None = None
    vocabulary: int = 256
    dtype: str = "fp32"

    def recipe(self, recompute: bool) -> Recipe:
        heads = {"num_attention_heads": self.heads, "num_query_groups": self.groups, "vocab_size": self.vocabulary}
        sizes = {"num_layers": self.layers, "hidden_size": self.hidden, "ffn_hidden_size": self.ffn}
        return recipe_of(
            {
                "model": {**sizes, **heads},
                "data": {"max_length": max(2, self.tokens)},
                "parallel": {"dp": 1},
                "train": {"dtype": self.dtype, "recompute": recompute, "global_batch_size": 1},
            }
        )

    def plan(self, variant: str, limits: Limits) -> StepPlan:
        """The checked plan of a variant."""
        if variant in (WHOLE, RECOMPUTED):
            return whole(1, self.tokens, limits)
        pieces = [piece for (piece,) in memory_plans.pieces(0, self.tokens, self.slices)]
        count = len(pieces)
        order = (*(Op("F", i) for i in range(count)), *(Op("B", i) for i in reversed(range(count))))
        replayed = tuple(range(count - self.keep)) if variant == REPLAYED else ()
        micro_batches = tuple(MicroBatch((piece,), (0,)) for piece in pieces)
        return check(StepPlan(as_lengths([self.tokens]), micro_batches, limits, (order,), replayed=replayed))


def whole(count: int, length: int, limits: Limits) -> StepPlan:
    """One micro-batch of uncut sequences."""
    micro_batch = MicroBatch(tuple(Slice(i, 0, length) for i in range(count)), (0,))
    return check(StepPlan(as_lengths([length] * count), (micro_batch,), limits))


def tokens_of(shape: Shape) -> Callable[[int], npt.NDArray[np.int64]]:
    return lambda index: np.random.default_rng(index).integers(0, shape.vocabulary, shape.tokens)


@contextmanager
def hosted(shape: Shape, world: World, recompute: bool) -> Iterator[Any]:
    """A real Megatron-Core GPT in evenload's host, warmed up."""
    from evenload.integrations.megatron import open_host

    host = open_host(shape.recipe(recompute), world)
    host.gradients(whole(1, min(64, shape.tokens), Limits(1, shape.tokens)), tokens_of(shape))
    try:
        yield host
    finally:
        host.close()
        del host
        gc.collect()


def measure(shape: Shape, host: Any, plan: StepPlan, device: torch.device, runs: int = 1) -> tuple[Row, Gradients]:
    """Peak, loss, and seconds of the fastest of some steps without an update; the gradients."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(runs):
        gc.collect()
        began = clock()
        with Levels(device) as levels:
            result, gradients = host.gradients(plan, tokens_of(shape))
        peak = levels.read()[1]
        times.append(clock() - began)
    figures = {"peak_bytes": peak, "step_s": min(times), "tokens_per_s": shape.tokens / min(times)}
    return {**figures, "loss": result.loss}, gradients


def difference(gradients: Gradients, reference: Gradients) -> float:
    """Largest over parameters of ||g - ref|| / ||ref||."""

    def one(name: str) -> float:
        wanted = reference[name].double()
        return float((gradients[name].double() - wanted).norm() / wanted.norm())

    return max(one(name) for name in reference)


def run(shape: Shape, world: World, runs: int = 1, until: float = float("inf")) -> list[Row]:
    """A row for each variant; one that memory or time does not allow has ``failed`` instead of numbers."""
    rows: list[Row] = []
    reference: tuple[float, Gradients] | None = None
    memory: MemoryCost | None = None
    for recompute in (False, True):
        recipe = shape.recipe(recompute)
        with hosted(shape, world, recompute) as host:
            memory = memory or memory_plans.measured(recipe, world, host)
            limits = replace(memory_plans.predicted_at(recipe, memory, 1)[1], max_tokens=shape.tokens)
            for variant in (RECOMPUTED,) if recompute else (WHOLE, SLICED, REPLAYED):
                plan = shape.plan(variant, limits)
                row: Row = {"variant": variant, "predicted_bytes": peak_activation_bytes(plan, 0, 0)[0]}
                rows.append(row)
                if time.monotonic() > until:
                    row["failed"] = "no time left"
                    continue
                try:
                    figures, gradients = measure(shape, host, plan, world.device, runs)
                except torch.OutOfMemoryError as error:
                    row["failed"] = str(error).partition(".")[0]
                else:
                    reference = reference or (figures["loss"], gradients)
                    errors = {
                        "grad_rel_err": difference(gradients, reference[1]),
                        "loss_rel_err": abs(figures["loss"] / reference[0] - 1),
                    }
                    row |= {**figures, **errors}
                    del gradients
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()
    return sorted(rows, key=lambda row: VARIANTS.index(row["variant"]))


def benchmark(shape: Shape, world: World, runs: int = 1, until: float = float("inf")) -> Row:
    """All variants of a shape, and by how much the last one's peak is below those without slices."""
    rows = run(shape, world, runs, until)
    peak = {row["variant"]: row["peak_bytes"] for row in rows if "failed" not in row}

    def below(variant: str) -> float | None:
        return peak[variant] / peak[REPLAYED] if variant in peak and REPLAYED in peak else None

    about = {"device": machine(world.device), "torch": torch.__version__, "shape": vars(shape), "rows": rows}
    return {**about, "whole_over_replayed": below(WHOLE), "recomputed_over_replayed": below(RECOMPUTED)}


def table(result: Row) -> Any:
    if "shape" not in result:
        return memory_plans.table(result)
    first, shape = result["rows"][0].get("peak_bytes"), result["shape"]

    def unless_failed(show: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: "" if "failed" in row else show(row)

    cells = {
        "": "{variant}",
        "peak": lambda row: row.get("failed") or mib(row["peak_bytes"]),
        "of whole": unless_failed(lambda row: f"1/{first / row['peak_bytes']:.1f}" if first else ""),
        "predicted": lambda row: mib(row["predicted_bytes"]),
        "time": unless_failed(lambda row: seconds(row["step_s"])),
        "gradient error": unless_failed(lambda row: f"{row['grad_rel_err']:.1e}"),
    }
    title = f"one sequence of {shape['tokens']:,} tokens, {shape['slices']} slices, {shape['keep']} kept; "
    title += f"{shape['layers']} layers of {shape['hidden']}, {shape['dtype']}"
    return columns(title, result["rows"], cells, f"{result['device']}; torch {result['torch']}")


def mib(num_bytes: float | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def asked_for(asked: Any) -> Row:
    if asked.plans:
        return memory_plans.benchmark(asked.only)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed|torch)\.")
    bridge_cpu()
    world = init_world()
    torch.set_num_threads(asked.threads)
    result = benchmark(Shape(**{name: getattr(asked, name) for name in SIZES}, dtype=asked.dtype), world)
    close_world(world)
    return result


if __name__ == "__main__":
    sizes = {name: getattr(Shape(), name) for name in SIZES}
    own = options(__doc__, **sizes, dtype=("fp32", "bf16", "fp64"), threads=1, plans=False, only="")
    main(own, asked_for, table)
