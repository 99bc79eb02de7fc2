"""Measure what the trainer's real layers hold, and fit the memory model (`core.costs.memory`) to it.

Steps of two micro-batches that are both alive before the first backward (order F F B B), of n, 2n and 4n tokens, once
of whole sequences and once of sequences cut between the two. Memory is read where a micro-batch enters and leaves the
layers, forward and backward (`runtime.memory.Levels`): on CUDA from the allocator's books, on the CPU from the storages
that operators make. Bytes a token are slopes by least squares; what does not grow with the tokens is a pass's own. The
learning rate is zero and tokens are random.

Counted rather than measured: K and V of a token, and what sharding divides (`core.recipe.traits`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...core.costs.memory import peak_activation_bytes
from ...core.errors import EvenloadError
from ...core.laws import check
from ...core.plan.limits import Limits, MemoryCost
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan, as_lengths
from ...core.planning.setting import Setting, limits_of, stage_costs
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import VALUE_BYTES
from ...integrations.host.host import Host
from ...runtime.measure.memory import Levels, live_bytes
from ..job import Job
from .cases import there_and_back

COUNTS = (1, 2, 4)
"""Sequences of a micro-batch in the shapes that are measured."""
LENGTH = {"cuda": 1024, "cpu": 128}
"""Tokens of a sequence in them, by kind of device; fewer where the recipe has no longer ones."""
TINY = 8
"""Tokens of the step in which gradient sum and update hold the most."""

EXPECTED = ["begin", "inner", "last", "end", "begin", "inner", "last", "end", "head", "layers"]
"""Points of a step up to the end of its first backward (see `_watched`)."""


class Readings(NamedTuple):
    """Bytes of one step in which two micro-batches of ``tokens`` tokens each are alive at once."""

    tokens: int
    layers: float
    """Of one micro-batch, what all layers keep."""
    kept: float
    """Of one micro-batch from its forward to its backward, with the head, and the whole K and V of what it cuts."""
    head_peak: float
    """The highest level between the second micro-batch's last layer forward and the first one's backward."""
    layers_peak: float
    """The highest level in the first backward of the layers."""
    peak: float


class _Point(NamedTuple):
    name: str
    level: int
    highest: int
    """Since the point before."""


def measure_memory(job: Job, max_tokens: int) -> MemoryCost:
    """Bytes on this device, which holds the whole model; for a recipe without ``train.recompute``.

    A micro-batch has at most ``max_tokens``. Raises EvenloadError for a rank that holds a pipeline stage.
    """
    device, recipe, host = job.world.device, job.recipe, job.host
    if host.layout.pp > 1:
        do = "profile with parallel.pp=1, and fewer layers if they do not fit; plans divide the costs"
        raise EvenloadError("memory is measured on ranks that hold all layers", f"parallel.pp={host.layout.pp}", do)
    num_ranks, tp = host.layout.dp_cp_size, host.layout.tp

    def step(plan: StepPlan) -> None:
        host.train_step(plan, tokens_of, lr=0.0, mark=lambda where: job.watchdog.at(f"measuring memory, {where}"))

    length = max(1, min(LENGTH[device.type], recipe.data.max_length // 2, max_tokens // (2 * COUNTS[-1])))
    tokens_of = random_tokens(recipe)
    tiny = two_alive(1, min(TINY, length), cut=False, num_ranks=num_ranks)
    for _ in range(2):  # the first makes what later steps find
        step(tiny)
    gc.collect()
    fixed = live_bytes(device)
    with Levels(device) as levels:
        step(tiny)
    update_bytes = float(levels.read()[1])
    plans = [two_alive(n, length, cut=cut, num_ranks=num_ranks) for cut in (False, True) for n in COUNTS]
    readings = [_read(host, device, plan, step) for plan in plans]
    setting = Setting.of_recipe(recipe)
    shape, states = setting.shape, setting.traits.states
    kv_bytes = 2.0 * shape.kv_size * shape.num_layers * VALUE_BYTES[recipe.train.dtype] / tp
    memory = fit_memory_cost(readings[: len(COUNTS)], readings[len(COUNTS) :], kv_bytes)
    shares = setting.shares_of_rank(tp)
    parameters = shape.parameters * shares.get("fixed_bytes", 1.0)
    sharded = states.sharded * parameters
    measured = memory.model_dump(exclude_none=True) | {
        # Of what is shared with other ranks this one has its part.
        "fixed_bytes": float(fixed + sharded * (1 - 1 / num_ranks)),
        "sharded_bytes": float(sharded),
        "gathered_bytes": states.gathered_bytes(parameters),
        "gradient_bytes": float(states.late * parameters),
        "update_bytes": update_bytes,
    }
    memory = MemoryCost(**measured).of_model(tp, shares)
    memory = MemoryCost(**{name: round(value) for name, value in memory.model_dump(exclude_none=True).items()})
    return memory.model_copy(update={"fit_error": round(_error(job, memory, plans, readings), 4)})


def fit_memory_cost(whole: list[Readings], cut: list[Readings], kv_bytes_per_token: float) -> MemoryCost:
    """The coefficients of activations, head and passes, from readings at three or more token counts each.

    Every coefficient is a slope over tokens, never negative; ``pass_bytes`` is what of the head's peak does not grow.
    """
    tokens = [r.tokens for r in whole]
    activation, _ = line(tokens, [r.layers for r in whole])
    kept, _ = line(tokens, [r.kept for r in whole])
    head = max(0.0, kept - activation)
    head_working, head_constant = line(tokens, [r.head_peak - 2 * r.kept for r in whole])
    working, _ = line(tokens, [r.layers_peak - 2 * r.kept for r in whole])
    kept_cut, _ = line([r.tokens for r in cut], [r.kept for r in cut])
    # A micro-batch's slices are half of their sequences, whose K and V are stored whole.
    saves = kept - (kept_cut - 2 * kv_bytes_per_token)
    return MemoryCost(
        pass_bytes=round(max(0.0, head_constant)),
        activation_bytes_per_token=round(max(0.0, activation)),
        cut_saves_bytes_per_token=round(max(0.0, saves)),
        head_bytes_per_token=round(head),
        head_working_bytes_per_token=round(max(0.0, head_working)),
        working_bytes_per_token=round(max(0.0, working + head)),
        kv_bytes_per_token=kv_bytes_per_token,
    )


def line(x: list[int], y: list[float]) -> tuple[float, float]:
    """(slope, constant) of the least-squares line."""
    slope, constant = np.polyfit(np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64), 1).tolist()
    return slope, constant


def two_alive(count: int, length: int, *, cut: bool, num_ranks: int = 1) -> StepPlan:
    """Two micro-batches a rank of ``count`` pieces of ``length`` tokens, forward both, then backward both.

    Whole sequences, or with ``cut`` the halves of twice as long ones.
    """
    per_rank = count if cut else 2 * count
    batch = as_lengths([length * (1 + cut)] * per_rank * num_ranks)
    micro_batches = []
    for half in (0, 1):
        for rank in range(num_ranks):
            first, start = (rank * per_rank, half * length) if cut else (rank * per_rank + half * count, 0)
            pieces = (Slice(first + i, start, start + length) for i in range(count))
            micro_batches.append(MicroBatch(tuple(pieces), (rank,)))
    order = (there_and_back(range(len(micro_batches))),)
    return check(StepPlan(batch, tuple(micro_batches), Limits(num_ranks, count * length), order, made_by="profile"))


def random_tokens(recipe: Recipe) -> Any:
    """Token ids of any sequence of a batch, the same at every call."""
    vocabulary = min(256, recipe.model.vocab_size or 256)

    def tokens_of(index: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(index).integers(0, vocabulary, recipe.data.max_length)

    return tokens_of


def _read(host: Host, device: torch.device, plan: StepPlan, step: Callable[[StepPlan], None]) -> Readings:
    points: list[_Point] = []
    gc.collect()
    with Levels(device) as levels, _watched(host, levels, points):
        step(plan)
        last = levels.read()[1]
    names = [p.name for p in points[: len(EXPECTED)]]
    assert names == EXPECTED, f"the passes of a step came as {names}"
    begin, inner, last_inner, _, second_begin, *_, head, layers = points[: len(EXPECTED)]
    # Where one layer begins as much of a pass is under way as where another does, so the difference is what they keep;
    # only the first has the embedding's output besides its input.
    num_layers = len(_layers(host))
    between = num_layers - 1 - _inner(num_layers)
    kept = second_begin.level - begin.level
    return Readings(
        tokens=plan.micro_batches[0].num_tokens,
        layers=(last_inner.level - inner.level) * num_layers / between if between else kept,
        kept=kept,
        head_peak=head.highest,
        layers_peak=layers.highest,
        peak=max(last, *(p.highest for p in points)),
    )


@contextmanager
def _watched(host: Host, levels: Levels, points: list[_Point]) -> Iterator[None]:
    """Note where a micro-batch is. Forward it enters the first layer (begin), the second if there are three (inner) and
    the last one (last), and leaves that (end); backward its gradient comes to the last layer (head) and leaves the
    first one (layers)."""

    def note(name: str) -> None:
        points.append(_Point(name, *levels.read()))

    def entering(_: nn.Module, inputs: Any, more: Any) -> None:
        note("begin")
        _when_back([*inputs, *more.values()], lambda _: note("layers"))

    def leaving(_: nn.Module, __: Any, outputs: Any) -> None:
        note("end")
        _when_back(outputs if isinstance(outputs, tuple) else [outputs], lambda _: note("head"))

    layers = _layers(host)
    with (
        layers[0].register_forward_pre_hook(entering, with_kwargs=True),
        layers[_inner(len(layers))].register_forward_pre_hook(lambda *_: note("inner")),
        layers[-1].register_forward_pre_hook(lambda *_: note("last")),
        layers[-1].register_forward_hook(leaving),
    ):
        yield


def _inner(num_layers: int) -> int:
    """The first layer that has others before and after it, if there is one."""
    return 1 if num_layers > 2 else 0


def _when_back(values: Any, call: Any) -> None:
    """Call when the gradient of the first of the values that has one is there."""
    tensor = next((v for v in values if isinstance(v, Tensor) and v.requires_grad), None)
    if tensor is not None:
        tensor.register_hook(call)  # type: ignore[no-untyped-call]


def _layers(host: Any) -> nn.ModuleList:
    """The transformer layers of the host's model: its largest list of modules."""
    model = host.engine.module if hasattr(host, "engine") else host.model
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda m: sum(getattr(p, "ds_numel", p.numel()) for p in m.parameters()))


def _error(job: Job, memory: MemoryCost, plans: list[StepPlan], readings: list[Readings]) -> float:
    """Mean absolute relative error of the predicted peaks of the steps that were measured."""
    at, setting = job.chain.context, Setting.of_recipe(job.recipe)
    costs = stage_costs(setting, at.costs.model_copy(update={"memory": memory}), at.layout)
    memory, limits = costs.memory, limits_of(setting, replace(at, costs=costs))
    errors = []
    for plan, measured in zip(plans, readings, strict=True):
        predicted, _ = peak_activation_bytes(replace(plan, limits=limits), 0, 0)
        errors.append(abs(max(predicted, memory.update_bytes) / measured.peak - 1.0))
    return float(np.mean(errors))
