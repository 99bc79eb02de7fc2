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

import argparse
import gc
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from evenload.commands.tables.show import emit, grid
from evenload.core.costs.memory import peak_activation_bytes
from evenload.core.input.format import seconds
from evenload.core.laws import check
from evenload.core.plan.limits import Limits, MemoryCost
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.recipe.recipe import Recipe, parse
from evenload.patches import bridge_cpu
from evenload.runtime.measure.memory import Levels
from evenload.runtime.world.world import World, close_world, init_world
from evenload.training.verbs.profile import machine


def _script(name: str) -> Any:
    """A script beside this one as a module; scripts are no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


memory_plans = _script("memory_plans")

WHOLE, RECOMPUTED, SLICED, REPLAYED = "whole", "recomputed", "sliced", "sliced, replayed"
VARIANTS = (WHOLE, RECOMPUTED, SLICED, REPLAYED)

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
        return parse(
            {
                "trainer": "megatron",
                "model": {
                    "num_layers": self.layers,
                    "hidden_size": self.hidden,
                    "num_attention_heads": self.heads,
                    "num_query_groups": self.groups,
                    "ffn_hidden_size": self.ffn,
                    "vocab_size": self.vocabulary,
                },
                "data": {"max_length": max(2, self.tokens)},
                "parallel": {"dp": 1},
                "train": {"dtype": self.dtype, "recompute": recompute, "global_batch_size": 1},
            }
        )

    def plan(self, variant: str, limits: Limits) -> StepPlan:
        """The checked plan of a variant."""
        if variant in (WHOLE, RECOMPUTED):
            return whole(1, self.tokens, limits)
        borders = np.linspace(0, self.tokens, self.slices + 1).astype(int).tolist()
        pieces = [Slice(0, a, b) for a, b in pairwise(borders)]
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
    """A real Megatron-Core GPT behind evenload's host, warmed up."""
    from evenload.integrations.megatron import open_host

    host = open_host(shape.recipe(recompute), world)
    host.gradients(whole(1, min(64, shape.tokens), Limits(1, shape.tokens)), tokens_of(shape))
    try:
        yield host
    finally:
        host.close()
        del host
        gc.collect()


def measure(
    shape: Shape, host: Any, plan: StepPlan, device: torch.device, runs: int = 1
) -> tuple[dict[str, Any], Gradients]:
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


def run(shape: Shape, world: World, runs: int = 1, until: float = float("inf")) -> list[dict[str, Any]]:
    """A row for each variant; one that memory or time does not allow has ``failed`` instead of numbers."""
    rows: list[dict[str, Any]] = []
    reference: tuple[float, Gradients] | None = None
    memory: MemoryCost | None = None
    for recompute in (False, True):
        recipe = shape.recipe(recompute)
        with hosted(shape, world, recompute) as host:
            memory = memory or memory_plans.measured(recipe, world, host)
            limits = replace(memory_plans.predicted_at(recipe, memory, 1)[1], max_tokens=shape.tokens)
            for variant in (RECOMPUTED,) if recompute else (WHOLE, SLICED, REPLAYED):
                plan = shape.plan(variant, limits)
                row: dict[str, Any] = {"variant": variant, "predicted_bytes": peak_activation_bytes(plan, 0, 0)[0]}
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


def benchmark(shape: Shape, world: World, runs: int = 1, until: float = float("inf")) -> dict[str, Any]:
    """All variants of a shape, and by how much the last one's peak is below those without slices."""
    rows = run(shape, world, runs, until)
    peak = {row["variant"]: row["peak_bytes"] for row in rows if "failed" not in row}

    def below(variant: str) -> float | None:
        return peak[variant] / peak[REPLAYED] if variant in peak and REPLAYED in peak else None

    return {
        "device": machine(world.device),
        "torch": torch.__version__,
        "shape": vars(shape),
        "rows": rows,
        "whole_over_replayed": below(WHOLE),
        "recomputed_over_replayed": below(RECOMPUTED),
    }


def table(result: dict[str, Any]) -> Any:
    first = result["rows"][0].get("peak_bytes")

    def line(row: dict[str, Any]) -> tuple[Any, ...]:
        if "failed" in row:
            return (row["variant"], row["failed"], "", mib(row["predicted_bytes"]), "", "")
        share = f"1/{first / row['peak_bytes']:.1f}" if first else ""
        error = f"{row['grad_rel_err']:.1e}"
        return row["variant"], mib(row["peak_bytes"]), share, mib(row["predicted_bytes"]), seconds(row["step_s"]), error

    shape = result["shape"]
    title = f"one sequence of {shape['tokens']:,} tokens, {shape['slices']} slices, {shape['keep']} kept; "
    title += f"{shape['layers']} layers of {shape['hidden']}, {shape['dtype']}"
    head = ("", "peak", "of whole", "predicted", "time", "gradient error")
    return grid(title, head, [line(row) for row in result["rows"]], f"{result['device']}; torch {result['torch']}")


def mib(num_bytes: float | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Shape()).items():
        if name not in ("dtype", "ffn"):
            parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--threads", type=int, default=1, help="Of the CPU; more than are idle make it slower.")
    parser.add_argument("--plans", action="store_true", help="Many small plans instead: see memory_plans.py.")
    parser.add_argument("--only", default="", help="With --plans: cases whose name holds this.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    parser.add_argument("--out", type=Path, help="Write the JSON here too.")
    arguments = vars(parser.parse_args())
    as_json, out, threads = (arguments.pop(name) for name in ("json", "out", "threads"))
    plans, only = arguments.pop("plans"), arguments.pop("only")
    if plans:
        report(memory_plans.benchmark(only), as_json, out, memory_plans.table)
        return
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|deepspeed|torch)\.")
    bridge_cpu()
    world = init_world()
    torch.set_num_threads(threads)
    result = benchmark(Shape(**arguments), world)
    close_world(world)
    report(result, as_json, out, table)


def report(result: dict[str, Any], as_json: bool, out: Path | None, table_of: Callable[[dict[str, Any]], Any]) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    emit(result, as_json, table_of)


if __name__ == "__main__":
    main()
