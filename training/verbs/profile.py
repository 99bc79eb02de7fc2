"""Measure this machine's real layers and links through the recipe's trainer, and fit the cost model to them.

Samples are training steps in which every rank has the same work at the same time (`profiling.cases`), so that
contention between the ranks of a host is in the coefficients. Little work first, until the time is spent; of a few runs
the least counts. What is measured of a step, and what it gives:

    forward, backward   busy seconds (`runtime.measure.busy`), linear in launches, tokens and pairs: the coefficients
    experts             the part of them inside modules of experts, linear in launches and tokens: ``expert_s``
    rest                all else that the rank computes: loading, the schedule, clearing gradients, clipping, the
                        optimizer. Linear in launches and tokens, half to each direction, and a constant: ``update_s``
    decode steps        by themselves (`profiling.decoding`): a step, a sample and a key of `evenload generate`
    collectives         by themselves (`runtime.measure.links`): latency and bandwidth of the links

The rest is counted in the same seconds as the passes: on a CPU with one thread a rank, CPU seconds of the thread, in
which waiting for a collective does not count. Where it does count, the simulator's exposed communication is taken off.
Steps are longer by the wall than by CPU seconds (other threads, the system, slower ranks): one factor, the wall seconds
of all samples over their simulated ones, goes onto every coefficient. Balance does not change.

Ranks keep the recipe's tensor parallelism and are data-parallel otherwise. Coefficients are those of the whole model,
so what a tensor-parallel rank takes is multiplied by their number: `Costs.of_stage` then gives back what was measured,
with the work in it that tensor parallelism does not divide (norms, residuals, calls).

Model and data are the recipe's, except that tokens are random, the learning rate is zero and nothing is recomputed:
`Costs.recomputed` says what recomputation costs. A recipe with tenants is measured with its base frozen, by steps of
the plugin that trains their adapters (`training.adapting`).
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import yaml

from ...core.aliases import Floats
from ...core.costs.busy import OtherLoad, load_average
from ...core.costs.by_setting import with_degrees, with_shardings
from ...core.costs.context import PlanningContext
from ...core.costs.costs import Costs, PassCost, Sharding, fit, solve
from ...core.errors import EvenloadError, RankError
from ...core.input.bounds import RANKS
from ...core.machine.cluster import Link
from ...core.plan.limits import MemoryCost
from ...core.planning.setting import Setting, costs_of
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...core.simulate.step import simulate
from ...integrations.host.trained import StepResult
from ...runtime.measure.busy import cpu_clock
from ...runtime.measure.links import LinkFit, measure_links
from ...runtime.measure.memory import free_bytes
from ...runtime.watchdog.watchdog import Watchdog
from ...runtime.world.variables import integer
from ...runtime.world.world import World
from ..adapting import adapter_training
from ..files import whole
from ..hosts import needs_of
from ..job import Job, in_world, logger, open_trainer
from ..profiling.cases import Case, cases
from ..profiling.decoding import measure_decoding
from ..profiling.degrees import at_degree_of
from ..profiling.experts import timing_experts
from ..profiling.memory import measure_memory, random_tokens
from ..progress import Progress, silent

BUDGET_S = 60.0
"""Wall time for all samples; memory and links come on top."""
LINKS_S = 8.0
"""Wall time for the links."""
REPEATS = 5
FEWEST_RUNS = 2
CASE_S = 2.0
"""A case is run again, `FEWEST_RUNS` to `REPEATS` times, while it has taken less than this."""
MEMORY_SHARE = 0.6
"""Share of the free memory that the largest micro-batch may take."""

Numbers = TypeVar("Numbers", PassCost, Link)

_FEWEST = 4
_SECONDS = ("forward_s", "backward_s", "rest_s", "experts_forward_s", "experts_backward_s", "step_s")
_UNWRITABLE = "the costs cannot be written"


@dataclass(frozen=True, kw_only=True)
class MeasuredCase(Case):
    """What one case took, the least of its runs, the mean of the ranks."""

    forward_s: float
    backward_s: float
    rest_s: float
    experts_forward_s: float = 0.0
    """The part of ``forward_s`` in which experts compute."""
    experts_backward_s: float = 0.0
    step_s: float
    """By the wall, of the slowest rank."""
    spread: float = 1.0
    """Median over least of its runs, by the wall."""
    runs: int


class Fitted(NamedTuple):
    """Coefficients, and how far they are from the samples."""

    forward: PassCost
    backward: PassCost
    update_s: float
    errors: dict[str, float]
    """Mean absolute relative error; ``step``: simulated against wall time of the whole step."""


def profile(
    recipe: Recipe,
    out: Path,
    degrees: Sequence[int] = (),
    also: Mapping[Sharding, Recipe] = MappingProxyType({}),
    progress: Progress = silent,
) -> dict[str, Any] | None:
    """Measure on this rank and write the costs to ``out``. Raises EvenloadError if that cannot be written.

    Args:
        degrees: of tensor parallelism, each of which is measured; none: the recipe's.
        also: recipes whose ranks divide something else between them, which are measured along with it.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise EvenloadError("a cost model is a YAML file", f"--out {out.name}", "give a name that ends in .yaml")
    if not os.path.isdir(out.parent) or not os.access(out.parent, os.W_OK):
        raise EvenloadError(_UNWRITABLE, f"{out.parent} is not a writable folder", "choose another --out")
    degrees = tuple(degrees) or (recipe.parallel.tp,)

    def one(world: World, watchdog: Watchdog, changed: Recipe, tp: int) -> tuple[Costs, dict[str, Any]]:
        with open_trainer(at_degree_of(changed, tp, world.size), world, watchdog) as job:
            return _measured(job, progress)

    def measure_all(world: World, watchdog: Watchdog) -> dict[str, Any]:
        results, measured = [], {}
        for tp in degrees:
            measured[tp], result = one(world, watchdog, recipe, tp)
            results.append(result)
        costs = with_degrees(measured) if len(degrees) > 1 else measured[degrees[0]]
        others = {sharding: one(world, watchdog, changed, degrees[0]) for sharding, changed in also.items()}
        costs = with_shardings(costs, {sharding: own for sharding, (own, _) in others.items()})
        if world.rank == 0:
            write_costs(costs, out)
        more: dict[str, Any] = {"by_tp": dict(zip(degrees, results, strict=True))} if len(degrees) > 1 else {}
        more |= {"by_sharding": {sharding: result for sharding, (_, result) in others.items()}} if others else {}
        return {**results[0], **more, "out": str(out)}

    return in_world(recipe.changed({"train.recompute": False}), measure_all)


def _measured(job: Job, progress: Progress) -> tuple[Costs, dict[str, Any]]:
    """The costs at the degree of tensor parallelism of a job, and what is said of them."""
    job.say_unused("profile")
    recipe, device = job.recipe, job.world.device
    cap = job.chain.caps.max_tokens
    cap = cap if cap < job.chain.limits.max_tokens else recipe.data.max_length
    load = load_average()
    _step(job, Case(1, min(64, recipe.data.max_length)))
    memory = _memory(job, cap)
    job.watchdog.at("timing the links")
    per_node = min(job.world.size, integer("LOCAL_WORLD_SIZE", job.world.size, 1, RANKS))
    links = measure_links(device, per_node, budget_s=LINKS_S) if job.world.size > 1 else {}
    sharers = 1 if device.type == "cuda" else per_node
    free = float(job.gather(MEMORY_SHARE * free_bytes(device) / sharers)[:, 0].min())
    cap = min(cap, int(free / max(1.0, memory.activation_bytes_per_token)))
    samples = measure(job, cases(recipe.data.max_length, cap), progress)
    decode = measure_decoding(job, _clock(device))
    beside = _beside(job, samples, load, per_node)
    measured = {name: fit.link for name, fit in links.items()}
    cluster = job.chain.context.cluster.model_copy(update=measured)
    # Whether `_clock` goes on while the rank waits.
    waiting_counts = device.type == "cuda" or torch.get_num_threads() > 1
    fitted = fit_samples(samples, replace(job.chain.context, cluster=cluster), waiting_counts=waiting_counts)
    rounded = {name: _rounded(link) for name, link in measured.items()}
    costs = Costs(
        source=_source(job),
        forward=_rounded(fitted.forward),
        backward=_rounded(fitted.backward),
        memory=memory,
        num_layers=shape_of(recipe.model).num_layers,
        update_s=_digits(fitted.update_s),
        intra=rounded.get("intra"),
        inter=rounded.get("inter"),
        fit_error=round(max(fitted.errors["forward"], fitted.errors["backward"]), 4),
        decode=decode,
        busy=beside if beside.busy else None,
        sharding=job.chain.context.traffic.sharding,
    )
    if recipe.adapts:
        costs = adapter_training(recipe).profiling().of_base(costs, shape_of(recipe.model))
    if job.is_rank0 and beside.busy:
        logger.warning("the machine was busy while it was measured (%s): profile again where it is quiet", beside)
    return costs, {
        "host": job.host.describe(),
        "ranks": job.world.size,
        "passes": {"forward": costs.forward.model_dump(), "backward": costs.backward.model_dump()},
        "update_s": fitted.update_s,
        "decode": decode and decode.model_dump(),
        "links": {name: _link(fit) for name, fit in links.items()},
        "fit_error": fitted.errors,
        "memory": memory.model_dump(),
        "samples": [asdict(sample) for sample in samples],
        "busy": beside.busy,
        "beside": beside.model_dump(),
        "source": costs.source,
    }


def _link(fit: LinkFit) -> dict[str, Any]:
    timings = [timing._asdict() for timing in fit.timings]
    return {**fit.link.model_dump(), "fit_error": fit.errors, "timings": timings}


def _beside(job: Job, samples: list[MeasuredCase], load: float, per_node: int) -> OtherLoad:
    """What ran on the busiest machine; ``load``: before the samples. Collective."""
    load = float(job.gather(max(load, load_average())).max())
    spread = float(np.median([sample.spread for sample in samples])) if samples else 1.0
    used = per_node * torch.get_num_threads()
    return OtherLoad(load=_digits(load), used=used, cores=os.cpu_count() or 1, spread=_digits(spread))


def measure(job: Job, wanted: Iterable[Case], progress: Progress = silent) -> list[MeasuredCase]:
    """Time the cases in order until `BUDGET_S` is spent; one that would overrun it is left out. Collective."""
    costs = job.chain.context.costs
    spent_s, slower, samples = 0.0, 0.0, []
    wanted = list(wanted)
    progress("profile", 0, len(wanted), "")
    for number, case in enumerate(wanted, 1):
        guess_s = costs.forward.of(case.work) + costs.backward.of(case.work)
        if slower * guess_s * FEWEST_RUNS > BUDGET_S - spent_s:
            progress("profile", number, len(wanted), f"{case} would take too long")
            continue
        runs: list[list[float]] = []
        taken_s = 0.0
        # Every rank sees the same numbers, so all stop together.
        while len(runs) < FEWEST_RUNS or (len(runs) < REPEATS and taken_s < CASE_S):
            runs.append(_step(job, case))
            taken_s += runs[-1][-1]
        spent_s += taken_s
        slower = taken_s / len(runs) / guess_s
        least = dict(zip(_SECONDS, np.min(runs, axis=0).tolist(), strict=True))
        spread = float(np.median([seconds for *_, seconds in runs]) / least["step_s"])
        samples.append(MeasuredCase(**vars(case), **least, spread=spread, runs=len(runs)))
        progress("profile", number, len(wanted), str(case))
    return samples


def fit_samples(samples: list[MeasuredCase], context: PlanningContext, *, waiting_counts: bool) -> Fitted:
    """Coefficients of the whole model for both directions and the rest. Raises RankError for too few samples.

    ``context``: layout, traffic and measured links; its costs are not read.
    """
    if len(samples) < _FEWEST:
        detail = f"{len(samples)} within {BUDGET_S:.0f} s and the free memory"
        do = "raise data.max_length if it is tiny, else profile a smaller model.num_layers"
        raise RankError("too few shapes could be measured to fit three coefficients", detail, do)
    num_ranks, tp = context.layout.dp_cp_size, context.layout.tp
    work = np.array([sample.work for sample in samples])
    forward, forward_error = _fit_pass(work, *np.array([(s.forward_s, s.experts_forward_s) for s in samples]).T)
    backward, backward_error = _fit_pass(work, *np.array([(s.backward_s, s.experts_backward_s) for s in samples]).T)
    passes = Costs(source="profile", forward=forward, backward=backward)
    plans = [sample.plan(num_ranks) for sample in samples]
    rest = np.array([s.rest_s for s in samples])
    if waiting_counts:
        trial = replace(context, costs=passes)
        exposed = [float(simulate(plan, trial, record=False).exposed_s.max()) for plan in plans]
        rest = np.maximum(0.0, rest - exposed)
    whole = rest + [s.forward_s + s.backward_s for s in samples]
    columns = np.column_stack([work[:, :2], np.ones(len(work))])
    (launch_s, token_s, constant_s), _ = solve(columns, rest, whole)
    half = PassCost(launch_s=launch_s / 2, token_s=token_s / 2)
    sharded = context.traffic.sharding != "none"
    update_s = float(constant_s) * (num_ranks if sharded else 1)
    costs = Costs(source="profile", forward=forward.plus(half), backward=backward.plus(half), update_s=update_s)
    known = replace(context, costs=costs)
    simulated = np.array([simulate(plan, known, record=False).step_s for plan in plans])
    wall = np.array([s.step_s for s in samples])
    slower = float(wall.sum() / simulated.sum())
    step_error = float(np.abs(slower * simulated / wall - 1).mean())
    errors = {"forward": forward_error, "backward": backward_error, "step": step_error}
    forward, backward = (cost.scaled(tp * slower, slower) for cost in (costs.forward, costs.backward))
    return Fitted(forward, backward, update_s * tp * slower, errors)


def _fit_pass(work: Floats, seconds: Floats, at_experts: Floats) -> tuple[PassCost, float]:
    """Coefficients of a direction and their error (`costs.fit`); ``at_experts`` is a part of ``seconds``, [N] each."""
    cost, error = fit(work, seconds - at_experts)
    if not at_experts.any():
        return cost, error
    (launch_s, expert_s), _ = solve(work[:, :2], at_experts, seconds)
    cost = cost.plus(PassCost(launch_s=launch_s, token_s=0.0, expert_s=expert_s))
    return cost, float(np.abs(cost.of_each(work) / seconds - 1).mean())


def write_costs(costs: Costs, out: Path) -> None:
    """Write a file that `core.costs.load` reads, whole or not at all. Raises RankError: by then all is measured."""
    unused = {name for name in ("by_tp", "by_sharding") if not getattr(costs, name)}
    form = costs.model_dump(exclude_none=True, exclude=unused)
    text = yaml.safe_dump(form, sort_keys=False, width=118)
    try:
        with whole(out) as part:
            part.write_text(text)
    except EvenloadError as error:
        raise RankError(_UNWRITABLE, error.found, "choose another --out") from error


def _step(job: Job, case: Case) -> list[float]:
    """The `_SECONDS` of one step: the mean of the ranks, but by the wall those of the slowest one."""
    device, plan = job.world.device, case.plan(job.host.layout.dp_cp_size)
    step: Callable[..., StepResult] = partial(job.host.train_step, lr=0.0)
    if job.recipe.adapts:
        step = partial(adapter_training(job.recipe).profiling().step, job.host)
    tokens_of, clock = random_tokens(job.recipe), _clock(device)
    job.gather(0.0)
    start, computed_s = time.perf_counter(), clock()
    mark = job.watchdog.at
    with timing_experts(job.host, clock) as experts:
        result = step(plan, tokens_of, mark=lambda where: mark(f"{case} tokens, {where}"))
    computed_s = clock() - computed_s
    step_s = time.perf_counter() - start
    passes_s = (result.forward_s, result.busy_s - result.forward_s, computed_s - result.busy_s)
    rows = job.gather(*passes_s, experts.forward_s, experts.backward_s, step_s)
    return [*rows[:, :-1].mean(axis=0).tolist(), float(rows[:, -1].max())]


def _clock(device: torch.device) -> Callable[[], float]:
    """The seconds in which `runtime.measure.busy` counts, for whole steps."""
    if device.type == "cpu":
        return cpu_clock()

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _memory(job: Job, max_tokens: int) -> MemoryCost:
    """Measured where a rank trains the model; else counted from the shape, with a word about it."""
    recipe = job.recipe
    if not recipe.adapts:
        return measure_memory(job, max_tokens)
    do = "profile without tenants, and name that file in costs"
    logger.info("bytes are counted, not measured, of a frozen base: %s to measure them", do)
    return costs_of(Setting.of_recipe(recipe.changed({"costs": "auto"})), job.chain.context.cluster).memory


def _source(job: Job) -> str:
    host, shape = job.host.describe(), job.recipe.model.model_dump(mode="json", exclude_none=True)
    packages = (need.distribution.replace("-", "_") for need in needs_of(job.recipe.trainer))
    versions = (f"{name} {host[name]}" for name in packages if name in host)
    about = ", ".join(f"{key} {value}" for key, value in shape.items())
    ranks = f"{job.world.size} ranks at once" if job.world.size > 1 else "1 rank"
    parts = (machine(job.world.device), ranks, ", ".join(versions), job.recipe.train.dtype, about)
    return f"{'; '.join(parts)}; `{' '.join(['evenload', *sys.argv[1:]])}`"


def machine(device: torch.device) -> str:
    """The name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {torch.get_num_threads()} thread(s)"


def _rounded(numbers: Numbers) -> Numbers:
    return type(numbers)(**{name: _digits(value) for name, value in numbers.model_dump().items()})


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
