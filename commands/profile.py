"""Measure this machine's real layers through the recipe's trainer, and fit the cost model to them.

Samples are training steps of one micro-batch each, of n sequences of L tokens, over a grid of (n, L): forward and
backward seconds of a rank alone, the least of a few runs (what the machine takes when nothing disturbs it). Small
shapes first, until the time is spent. `core.costs.fit` finds launch_s, token_s and pair_s of each direction. Memory
comes from two shapes: the slope of what is held for backward, and what is alive after a step.

A world of one measures no collectives: link times stay those of the recipe's ``cluster``. Model and data are the
recipe's, except that tokens are random and the learning rate is zero.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import yaml

from ..core.costs import Costs, MemoryCost, PassCost, fit
from ..core.errors import EvenloadError
from ..core.recipe import Recipe
from ..core.workload import Limits, MicroBatch, Slice, StepPlan, sequences
from ..runtime.held import free_bytes, held_for_backward, live_bytes
from .job import Job, run_rank
from .show import progress

BUDGET_S = 40.0
"""Wall time for all samples; two more steps measure memory."""
REPEATS = 5
SHAPE_S = 1.5
"""A shape is run again, up to `REPEATS` times, while it has taken less than this."""
MEMORY_SHARE = 0.6
"""Share of the free memory that the largest shape may take."""


_FEWEST = 4
_UNWRITABLE = "the costs cannot be written"


class Shape(NamedTuple):
    """A micro-batch of ``num`` sequences of ``length`` tokens."""

    num: int
    length: int

    @property
    def tokens(self) -> int:
        return self.num * self.length

    @property
    def pairs(self) -> float:
        return 0.5 * self.num * self.length**2

    @property
    def micro_batch(self) -> MicroBatch:
        return MicroBatch(tuple(Slice(i, 0, self.length) for i in range(self.num)), (0,))

    @property
    def plan(self) -> StepPlan:
        batch = sequences([self.length] * self.num)
        return StepPlan(batch, (self.micro_batch,), Limits(1, self.tokens), made_by="profile").check()


@dataclass(frozen=True)
class Sample:
    """What one shape took, the least of its runs."""

    num: int
    length: int
    forward_s: float
    backward_s: float
    runs: int


def profile(recipe: Recipe, out: Path) -> dict[str, Any] | None:
    """Measure on this rank and write the costs to ``out``. Raises EvenloadError if that cannot be written."""
    _refuse_unwritable(out)
    return run_rank(recipe, lambda job: _profile(job, out))


def _profile(job: Job, out: Path) -> dict[str, Any]:
    config = getattr(job.recipe.plugins, "packing", None)
    cap = max(config.max_tokens if config and config.enabled else 0, job.recipe.data.max_length)
    job.watchdog.at("warming up")
    _step(job, Shape(1, min(64, job.recipe.data.max_length)))
    memory = measure_memory(job, cap)
    free = MEMORY_SHARE * free_bytes(job.world.device)
    cap = min(cap, int(free / max(1.0, memory.activation_bytes_per_token)))
    samples = measure(job, shapes(job.recipe.data.max_length, cap))
    forward, backward, errors = fit_samples(samples)
    costs = Costs(
        source=_source(job),
        forward=_rounded(forward),
        backward=_rounded(backward),
        memory=memory,
        num_layers=_layers_and_kv(job.recipe)[0],
        fit_error=round(max(errors.values()), 4),
    )
    write_costs(costs, out)
    return {
        "host": job.host.describe(),
        "passes": {"forward": forward.model_dump(), "backward": backward.model_dump()},
        "fit_error": errors,
        "memory": memory.model_dump(),
        "samples": [asdict(sample) for sample in samples],
        "source": costs.source,
        "out": str(out),
    }


def shapes(max_length: int, max_tokens: int) -> list[Shape]:
    """Lengths and counts by powers of four, and the longest length alone; few tokens first.

    Two lengths at least differ at equal tokens, which is what tells token_s and pair_s apart.
    """
    lengths = [n for n in (64 * 4**k for k in range(12)) if n < max_length] + [max_length]
    grid = {Shape(4**k, n) for n in lengths for k in range(5) if 4**k * n <= max_tokens}
    return sorted(grid, key=lambda s: (s.tokens, s.pairs))


def measure(job: Job, wanted: Iterable[Shape]) -> list[Sample]:
    """Time the shapes in order until `BUDGET_S` is spent; one that would overrun it is left out."""
    costs = job.chain.situation.costs
    start, slower, samples = time.perf_counter(), 0.0, []
    wanted = list(wanted)
    with progress(job.leads) as bar, bar.task("profile", len(wanted)) as tick:
        for shape in wanted:
            guess_s = sum(costs.micro_batch_s(shape.micro_batch))
            left_s = BUDGET_S - (time.perf_counter() - start)
            if slower * guess_s > left_s:
                tick(f"{shape.num} x {shape.length} would take too long")
                continue
            job.watchdog.at(f"{shape.num} sequences of {shape.length} tokens")
            began = time.perf_counter()
            times: list[tuple[float, float]] = []
            while len(times) < REPEATS and (not times or time.perf_counter() - began < SHAPE_S):
                times.append(_step(job, shape))
            slower = (time.perf_counter() - began) / len(times) / guess_s
            forward_s, backward_s = np.min(times, axis=0).tolist()
            samples.append(Sample(shape.num, shape.length, forward_s, backward_s, len(times)))
            tick(f"{shape.num} x {shape.length}")
    return samples


def fit_samples(samples: list[Sample]) -> tuple[PassCost, PassCost, dict[str, float]]:
    """Coefficients of both directions, and each fit's mean absolute relative error. Raises EvenloadError."""
    if len(samples) < _FEWEST:
        raise EvenloadError(
            "too few shapes could be measured to fit three coefficients",
            f"{len(samples)} within {BUDGET_S:.0f} s and the free memory",
            "raise data.max_length if it is tiny, else profile a smaller model.num_layers",
        )
    work = [(shape.tokens, shape.pairs) for shape in (Shape(s.num, s.length) for s in samples)]
    forward, forward_error = fit(work, [s.forward_s for s in samples])
    backward, backward_error = fit(work, [s.backward_s for s in samples])
    return forward, backward, {"forward": forward_error, "backward": backward_error}


def measure_memory(job: Job, max_tokens: int) -> MemoryCost:
    """Bytes on this device, which holds the whole model."""
    device, recipe = job.world.device, job.recipe
    job.watchdog.at("measuring memory")
    fixed = live_bytes(device)
    length = min(1024 if device.type == "cuda" else 128, recipe.data.max_length, max(1, max_tokens // 4))
    held = []
    for shape in (Shape(1, length), Shape(4, length)):
        with held_for_backward(device) as one:
            job.host.gradients(shape.plan, _random_tokens(recipe))
        held.append(one.num_bytes)
    layers, kv_values = _layers_and_kv(recipe)
    value_bytes = {"fp32": 4, "bf16": 2, "fp64": 8}[recipe.train.dtype]
    return MemoryCost(
        fixed_bytes=float(fixed),
        activation_bytes_per_token=round(max(0.0, (held[1] - held[0]) / (3 * length))),
        kv_bytes_per_token=float(layers * kv_values * value_bytes),
    )


def write_costs(costs: Costs, out: Path) -> None:
    """Write a file that `core.costs.load` reads, whole or not at all. Raises EvenloadError."""
    text = yaml.safe_dump(costs.model_dump(exclude_none=True), sort_keys=False, width=118)
    try:
        handle, part = tempfile.mkstemp(prefix=out.stem, suffix=".part", dir=out.parent)
        try:
            with open(handle, "w") as file:
                file.write(text)
            os.chmod(part, 0o644)
            os.replace(part, out)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        raise EvenloadError(_UNWRITABLE, f"{out}: {error.strerror}", "choose another --out") from error


def _step(job: Job, shape: Shape) -> tuple[float, float]:
    """(forward, backward) seconds of one step."""
    result = job.host.train_step(shape.plan, _random_tokens(job.recipe), lr=0.0)
    return result.forward_s, result.busy_s - result.forward_s


def _random_tokens(recipe: Recipe) -> Any:
    vocabulary = min(256, recipe.model.vocab_size or 256)

    def tokens_of(index: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(index).integers(0, vocabulary, recipe.data.max_length)

    return tokens_of


def _layers_and_kv(recipe: Recipe) -> tuple[int, int]:
    """Layers, and values of K and V per token and layer."""
    model = recipe.model
    if model.config is None:
        return model.num_layers, 2 * model.hidden_size // model.num_attention_heads * model.kv_heads
    fields = json.loads(model.config.read_text())
    heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // heads
    return fields["num_hidden_layers"], 2 * head_dim * (fields.get("num_key_value_heads") or heads)


def _source(job: Job) -> str:
    """Machine, versions, model and command."""
    host, model = job.host.describe(), job.recipe.model
    versions = [f"{k} {host[k]}" for k in ("torch", "megatron_core", "deepspeed", "transformers") if k in host]
    shape = model.model_dump(mode="json", exclude_none=True)
    command = " ".join(["evenload", *sys.argv[1:]])
    about = ", ".join(f"{key} {value}" for key, value in shape.items())
    return f"{machine(job.world.device)}; {', '.join(versions)}; {job.recipe.train.dtype}; {about}; `{command}`"


def machine(device: torch.device) -> str:
    """The name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.get_num_threads()} thread(s)"


def _rounded(cost: PassCost) -> PassCost:
    return PassCost(**{name: float(f"{value:.4g}") for name, value in cost.model_dump().items()})


def _refuse_unwritable(out: Path) -> None:
    if out.suffix not in (".yaml", ".yml"):
        raise EvenloadError("a cost model is a YAML file", f"--out {out.name}", "give a name that ends in .yaml")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise EvenloadError(_UNWRITABLE, f"{out.parent} is no writable folder", "choose another --out")
