"""Plan from a file of lengths alone, on any machine, and say what it gains. All times are predicted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ...core.costs.context import PlanningContext
from ...core.costs.memory import activation_budget_bytes, fixed_bytes
from ...core.errors import EvenloadError, PlanError, refuse_first, shorten, shown
from ...core.input.bounds import refuse_endless
from ...core.input.format import GIB, to_json
from ...core.laws import check
from ...core.plan.step_plan import Lengths, StepPlan, as_lengths
from ...core.plan_json import file_json
from ...core.planning.chain import PlanChain
from ...core.planning.gains import NOTHING
from ...core.planning.judge import certified_s, outcome_of
from ...core.planning.planner import Draw
from ...core.planning.setting import costs_named
from ...core.recipe.recipe import Recipe
from ...core.recipe.rules import refuse_idle_ranks
from ...core.simulate.events import grid
from ...core.simulate.predict import micro_batch_imbalance
from ...core.simulate.step import Simulation, simulate
from ...data.lengths import read_lengths, read_prompted
from ...data.rows.groups import group_numbers
from ...data.rows.readers import JsonlRows
from ..adapting import adapter_training
from ..drawing import Drawing, batch_size, refuse_short_data, with_layers
from ..experts.replay import Replay, loads_for, replay
from ..pipelines import describe
from .samples import ForecastSamples, GivenLengths, pieces_of, samples_of
from .trees import TreesOfStep, planned_trees

_MOST_ROWS = 32
"""Ranks of stages whose programs are shown."""
_CAPS = ("max_tokens", "activation_gib")
"""Settings of plugins that cap what a rank holds."""


@dataclass(frozen=True)
class Simulated:
    """A plan and what it comes to."""

    plan: StepPlan
    outcome: Simulation
    ignores: str = ""
    """Which setting of the recipe the plan of a baseline does not keep: one that does not is shown and not compared."""

    @property
    def peak_bytes(self) -> float:
        """The most that any rank holds."""
        return float(self.outcome.peak_bytes.max())


@dataclass(frozen=True)
class PlannedStep:
    """One global batch as evenload and as every baseline would run it."""

    ours: Simulated
    baselines: dict[str, Simulated]
    plan_s: float
    """Seconds the planning took, measured; everything else is predicted."""
    delay_steps: float = 0.0
    certified_s: float = 0.0
    """No plan of the settings takes a step of less, predicted; 0: none is certified."""
    trees: TreesOfStep | None = None
    """What computing shared prompts once comes to, where the lengths have any."""

    @property
    def bound_s(self) -> float:
        """Lower bound, predicted; where the planner gives none, its own work spread evenly."""
        return self.certified_s or float(self.ours.outcome.busy_s.mean())


class Unused(NamedTuple):
    """What plugins that are off would gain."""

    plugins: tuple[str, ...]
    line: str
    """What switches them on, below ``plugins`` of the recipe, a line each."""
    gain: float = 0.0
    """The forecast's steps over those with them; 0: not planned, as that takes long."""
    plan_s: float = 0.0
    """Seconds of planning a step, measured."""


@dataclass(frozen=True)
class Forecast:
    """What `plan` says: everything its tables and pictures are made of."""

    recipe: Recipe
    chain: PlanChain
    lengths: Lengths
    """Tokens of every sample of the file, as training would cut them."""
    steps: tuple[PlannedStep, ...]
    loads: Replay | None = None
    """Recorded loads of experts under every planner of layers, where they are given."""
    times: Literal["predicted", "measured"] = "predicted"
    """What the seconds of its steps are; bounds and bytes are predicted in either case."""
    tenants: dict[str, Any] | None = None
    """Whose samples they are and what planning these tenants together saves (`PlannedTenants.saving`)."""
    unused: tuple[Unused, ...] = ()
    """Plugins that are off (`unused.with_unused`)."""

    @property
    def gaining(self) -> list[Unused]:
        """Plugins that are off and gain something, the most first."""
        return sorted((one for one in self.unused if one.gain > 1 + NOTHING), key=lambda one: -one.gain)

    @property
    def fixed_bytes(self) -> float:
        """Weights, gradients and optimizer states that a rank holds; 0 where the costs say nothing of them."""
        return fixed_bytes(self.chain.context.costs.memory, self.chain.limits)

    @property
    def costs_differ(self) -> str:
        """Says which other model than the recipe's its costs are of; empty where there is none."""
        costs, layers = costs_named(self.recipe.costs), self.recipe.model.num_layers
        if costs is None or costs.num_layers in (1, layers):
            return ""
        return f"these costs are of {costs.num_layers} layers and the model has {layers}; costs=auto counts the model's"

    def to_json(self, *, explain: bool = False) -> dict[str, Any]:
        """The documented result of ``plan --json``; ``explain`` adds what every rank runs, as a grid."""
        context = self.chain.context
        return {
            "predicted": self.times == "predicted",
            "costs": context.costs.source,
            "costs_differ": self.costs_differ or None,
            "fixed_bytes": self.fixed_bytes,
            "cluster": context.cluster.name,
            "layout": vars(context.layout),
            "plugins": [p.name for p in self.recipe.enabled()],
            "samples": len(self.lengths),
            "steps": [
                {"step": number, **_step_json(step, self.chain), **(_program(step.ours.plan) if explain else {})}
                for number, step in enumerate(self.steps)
            ],
            "unused": [one._asdict() for one in self.unused],
            **({"tenants": self.tenants} if self.tenants else {}),
            **({"loads": self.loads.to_json()} if self.loads else {}),
        }


def look_ahead(
    recipe: Recipe,
    lengths: GivenLengths | Mapping[str, GivenLengths],
    steps: int,
    num_ranks: int | None = None,
    *,
    loads: Path | None = None,
    groups: Path | None = None,
    record: bool = False,
) -> Forecast:
    """Plan ``steps`` global batches drawn from a lengths file as training would draw them. Raises EvenloadError.

    Without ``num_ranks`` the world has the fewest that ``parallel.*`` needs; ``loads`` is a file that ``log.loads``
    named, to be replayed; ``groups`` one of as many integers as there are lengths: samples of one stay together, and
    batches are of whole groups. ``record`` keeps every step's timeline. Of a recipe with domains ``lengths`` are those
    of each by its name; of one with tenants files by tenant, none: their own data; and steps end with those of all.
    """
    layout = recipe.layout(num_ranks)
    chain = PlanChain.of_recipe(recipe, layout)
    recorded = loads_for(recipe, chain.context, loads) if loads else None
    if recipe.adapts:
        refuse_first(
            (groups is not None, "samples of tenants are in no groups", f"--groups {groups}", "leave --groups out")
        )
        return _of_tenants(recipe, chain, lengths, steps, record)
    refuse_idle_ranks(recipe.train, layout.dp)
    samples, drawing = _drawn(recipe, chain, lengths, groups)
    refuse_short_data(recipe, samples.lengths, "the lengths file holds fewer {} than one global batch", "")
    refuse_endless(samples.lengths, chain.largest_slice)
    recipe = with_layers(recipe, layout.world_size, lambda chain: _drawn(recipe, chain, lengths, groups)[1])
    chain = PlanChain.of_recipe(recipe, recipe.layout(layout.world_size))
    drawing = _drawn(recipe, chain, lengths, groups)[1]
    planned = [_planned(chain, drawing(), record) for _ in range(steps)]
    replayed = replay(recipe, chain, planned[0].ours.plan, recorded) if recorded else None
    return Forecast(recipe, chain, samples.lengths, _comparable(planned), replayed)


def _drawn(recipe: Recipe, chain: PlanChain, lengths: Any, groups: Path | None) -> tuple[ForecastSamples, Drawing]:
    """The samples, and their batches as training draws them. Raises EvenloadError."""
    if groups is None and recipe.data.group is None:
        samples = samples_of(recipe, lengths)
        return samples, samples.drawing(recipe, chain)
    detail, do = f"data.group {recipe.data.group}, --groups {groups}", "set data.group=null, and leave --groups out"
    if isinstance(lengths, Mapping):
        raise EvenloadError("lengths of domains say no groups", detail, do)
    all_lengths, prompted = read_prompted(lengths) if isinstance(lengths, Path) else (lengths, None)
    refuse_first((prompted is not None, "prompts with their completions are groups already", detail, do))
    pieces = pieces_of(recipe, all_lengths)
    numbers = _numbers(groups, len(all_lengths)) if groups else _of_rows(recipe.data.group, lengths)
    of_samples = np.unique(numbers[pieces.document], return_inverse=True)[1]
    size, seed = batch_size(recipe), recipe.train.seed
    return ForecastSamples(pieces.length), Drawing(None, pieces.length, size, chain, seed=seed, groups=of_samples)


def _numbers(path: Path, count: int) -> Lengths:
    """The group of each sample of a lengths file, from a file that is written alike. Raises EvenloadError."""
    numbers = read_lengths(path)
    if len(numbers) != count:
        what = "the file of groups has not one number for each length"
        detail = f"{len(numbers)} in {shorten(str(path))}, {count} lengths"
        raise EvenloadError(what, detail, "give one positive integer for each sample")
    return numbers


def _of_rows(field: str | None, lengths: GivenLengths) -> Lengths:
    """The group that each row of a lengths file names in the field of ``data.group``. Raises EvenloadError."""
    if field is not None and isinstance(lengths, Path) and lengths.suffix == ".jsonl":
        return as_lengths(group_numbers(JsonlRows(lengths), field)[1])
    detail = f"data.group {shown(field)}, and no .jsonl of rows"
    raise EvenloadError("lengths say no groups", detail, "give --groups FILE, or set data.group=null")


def _of_tenants(recipe: Recipe, chain: PlanChain, lengths: Any, steps: int, record: bool) -> Forecast:
    tenants = adapter_training(recipe).tenants(recipe, lengths)
    adapted = tenants.adapted(chain)
    planned = [_planned(adapted, draw, record) for draw in islice(tenants.draws(chain), steps)]
    saving = tenants.saving(chain, [step.ours.plan for step in planned])
    return Forecast(recipe, adapted, as_lengths(tenants.lengths), _comparable(planned), tenants=saving)


def _planned(chain: PlanChain, draw: Draw, record: bool) -> PlannedStep:
    batch, trees = as_lengths(draw.lengths), None
    if draw.trunks is None:
        chain = chain.of_groups(draw.groups)
    else:
        trees = planned_trees(chain, batch, as_lengths(draw.groups), draw.trunks)
    tenants = None if draw.tenants is None else as_lengths(draw.tenants)
    start = time.perf_counter()
    step_plan = chain.plan(batch, tenants)
    plan_s = time.perf_counter() - start
    baselines = _baselines(chain, batch, tenants, record)
    least_s = certified_s(step_plan, chain.context)
    return PlannedStep(simulated(step_plan, chain, record), baselines, plan_s, draw.delay_steps, least_s, trees)


def _comparable(planned: list[PlannedStep]) -> tuple[PlannedStep, ...]:
    """The steps next to the baselines that can plan every one of them: some share nothing, and a sequence may be too
    long for them."""
    known = [name for name in planned[0].baselines if all(name in step.baselines for step in planned)]
    return tuple(replace(step, baselines={name: step.baselines[name] for name in known}) for step in planned)


def write_plans(forecast: Forecast, path: Path) -> None:
    """Write the plans as ``plan.json``. Raises EvenloadError."""
    caps = {
        plugin.name: {key: value for key in _CAPS if (value := getattr(config, key, None)) is not None}
        for plugin, config in forecast.chain.links
    }
    text = to_json(file_json((step.ours.plan for step in forecast.steps), caps))
    try:
        # A pipe that nobody reads is refused instead of waited for.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        os.set_blocking(handle, True)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        detail = f"{shorten(str(path))}: {error.strerror}"
        raise EvenloadError("the plan cannot be written", detail, "choose another --out") from error


def simulated(step_plan: StepPlan, chain: PlanChain, record: bool = False) -> Simulated:
    """A plan and what it is predicted to come to; ``record``: with its timeline."""
    return Simulated(step_plan, (simulate if record else outcome_of)(step_plan, chain.context))


def _baselines(chain: PlanChain, batch: Lengths, tenants: Lengths | None, record: bool) -> dict[str, Simulated]:
    rows = {}
    for name in chain.rivals.of_batch(batch, "shown"):
        with suppress(EvenloadError):
            row = simulated(chain.baseline(name, batch, tenants), chain, record)
            rows[name] = replace(row, ignores=chain.rivals.breaks(name, row.plan))
    return rows


def _step_json(step: PlannedStep, chain: PlanChain) -> dict[str, Any]:
    plan = step.ours.plan
    return {
        "plan_s": step.plan_s,
        **_outcome_json(step.ours, chain),
        "bound_s": step.bound_s,
        "padding_frac": plan.padding_frac,
        "micro_batches": len(plan.micro_batches),
        "pipeline": describe(plan, step.ours.outcome),
        "tokens": plan.num_tokens,
        "notes": [*plan.notes, *_bound_note(plan, chain)],
        "delay_steps": step.delay_steps,
        "baselines": {
            name: {
                **_outcome_json(one, chain),
                "ignores": one.ignores or None,
                "over_caps": one.ignores or over_caps(one, step.ours, chain.context),
            }
            for name, one in step.baselines.items()
        },
        **({"trees": step.trees._asdict()} if step.trees else {}),
    }


def over_caps(baseline: Simulated, ours: Simulated, context: PlanningContext) -> str | None:
    """What a baseline breaks of the caps on tokens and memory under which evenload planned; None: nothing."""
    limits = ours.plan.limits
    try:
        check(replace(baseline.plan, limits=baseline.plan.limits.held_to(limits), groups=ours.plan.groups))
    except PlanError as error:
        return f"{error.what} ({error.found})"
    memory = context.costs.memory
    most = activation_budget_bytes(context.cluster, memory, limits) + fixed_bytes(memory, limits)
    peak = baseline.peak_bytes
    if peak <= max(most, ours.peak_bytes):
        return None
    return f"a rank holds {peak / GIB:.3g} GiB, of the device {max(0.0, most) / GIB:.3g} GiB are to be used"


def _program(plan: StepPlan) -> dict[str, list[str]]:
    """``program``: a line for each rank of each stage, below one with the columns; the first `_MOST_ROWS` of them."""
    places = [(stage, rank) for rank in range(plan.limits.num_ranks) for stage in range(plan.limits.num_stages)]
    lines = grid(plan, places[:_MOST_ROWS]).splitlines()
    return {"program": lines + [f"... and {len(places) - _MOST_ROWS:,} more"] * (len(places) > _MOST_ROWS)}


def _outcome_json(one: Simulated, chain: PlanChain) -> dict[str, Any]:
    uneven = micro_batch_imbalance(one.plan, chain.context.costs)
    return {
        **{key: getattr(one.outcome, key) for key in ("step_s", "imbalance", "bubble_frac", "exposed_frac")},
        "peak_bytes": one.peak_bytes,
        "micro_batch_imbalance": dict(zip(("forward", "backward"), uneven, strict=True)),
    }


def _bound_note(step_plan: StepPlan, chain: PlanChain) -> list[str]:
    seconds = chain.context.costs.sequence_s(step_plan.lengths)
    mean = float(seconds.sum()) / chain.limits.num_ranks
    longest = float(seconds.max()) / chain.context.layout.cp
    if longest <= mean or step_plan.shared:
        return []
    tokens = int(step_plan.lengths[seconds.argmax()])
    return [f"one sequence of {tokens} tokens costs {longest / mean:.2f}x a rank's mean share and bounds the step"]
