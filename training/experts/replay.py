"""Recorded loads of experts replayed through every planner of layers: how busy the busiest rank of a group would be.

Planners that read a layer's counts have those of the file. Those that choose copies from the loads of earlier steps
know what they would know in training: all steps but the newest `late_steps`, as one plan is always being made ahead.
Steps that stand side by side, as one has too few ranks for a group, are one step. All planners are held to the laws of
quotas, on the same layers of the same passes. Ratios, copies, bytes and the seconds of a layer (`core.experts.seconds`,
with the recipe's costs and cluster) are predicted; the seconds that planning took are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...core.aliases import Floats, Ints
from ...core.costs.context import PlanningContext
from ...core.errors import EvenloadError, refuse_first
from ...core.experts.history import Loads, updated
from ...core.experts.quotas import check_quotas, copies_of, imbalance_of
from ...core.experts.seconds import LayerCost, layer_seconds
from ...core.laws import check_policy
from ...core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from ...core.plan.step_plan import StepPlan, as_lengths
from ...core.planning.chain import PlanChain
from ...core.recipe.recipe import Recipe
from ...core.recipe.sizes import shape_of
from ...core.registry import LayerPlugin, layer_planner, registered
from ...core.simulate.experts import layer_cost
from ...data.expert_loads import RecordedLoads, read_loads

_MOST_LAYERS = 2048
"""Layers of passes that are replayed, evenly spaced over the file: a planner takes up to milliseconds for one."""

PolicyOf = Callable[[StepPlan, PlanningContext], StepPlan]
"""Writes a policy of experts into a plan."""


class Replayed(NamedTuple):
    """What one planner makes of the loads; arrays are [passes of groups, layers]."""

    ratios: Floats
    """Tokens of the busiest rank over those of the mean rank."""
    copies: Floats
    """Of experts, on all ranks of the group together."""
    slots: int
    """The most copies that a rank had of a layer."""
    plan_s: float
    """Of a layer, the median, measured."""
    layer_s: float
    """Of a layer's experts and exchanges, forward and backward, on average; nan where costs know no experts."""
    exposed_s: float
    """The part of it in which copies and their gradients travel, none of it hidden."""
    planner: str
    """Of layers, as the policy names it."""
    late_steps: int
    """How many of the newest steps its copies do not know; 0: it chooses from the counts of the pass."""


@dataclass(frozen=True)
class Replay:
    """A file of loads under every planner."""

    loads: RecordedLoads
    ep: int
    steps: tuple[int, ...]
    """That are replayed: of the first ones planners that look back know nothing."""
    weight_bytes: float
    """Of one expert."""
    planners: dict[str, Replayed]
    """By name, each plugin before its baselines."""
    notes: tuple[str, ...]

    @property
    def passes(self) -> int:
        """The number of groups' passes in all of these steps."""
        return len(next(iter(self.planners.values())).ratios)

    def to_json(self) -> dict[str, Any]:
        """The section ``loads`` of ``plan --json``."""
        return {
            "predicted": True,
            "file": self.loads.name,
            "recorded": {"ranks": self.loads.num_ranks, "ep": self.loads.ep, "steps": len(self.loads.steps)},
            "ep": self.ep,
            "layers": list(self.loads.layers),
            "steps": {"first": self.steps[0], "last": self.steps[-1], "count": len(self.steps)},
            "passes": self.passes,
            "planners": {name: self._row(one) for name, one in self.planners.items()},
            "notes": list(self.notes),
        }

    def _row(self, one: Replayed) -> dict[str, Any]:
        p50, p95 = np.percentile(one.ratios, (50, 95)).tolist()
        copies = float(one.copies.mean())
        return {
            "imbalance_p50": p50,
            "imbalance_p95": p95,
            "imbalance_max": float(one.ratios.max()),
            "imbalance_of_layers": one.ratios.mean(axis=0).tolist(),
            "copies": copies,
            "copied_bytes": copies * self.weight_bytes,
            "slots": one.slots,
            "plan_ms_measured": 1e3 * one.plan_s,
            "layer_ms": None if np.isnan(one.layer_s) else 1e3 * one.layer_s,
            "exposed_ms": None if np.isnan(one.layer_s) else 1e3 * one.exposed_s,
            "planner": one.planner,
            "late_steps": one.late_steps,
        }


def loads_for(recipe: Recipe, context: PlanningContext, path: Path) -> RecordedLoads:
    """The loads of a file for ranks of the recipe. Raises EvenloadError for a file that is damaged or of another model,
    and where no rank shares experts with another."""
    loads = loads_of_model(recipe, path)
    alone = "--loads replays what ranks do that share experts", "parallel.ep 1: every rank has all of them"
    refuse_first((context.layout.ep == 1, *alone, "set parallel.ep, e.g. parallel.ep=2"))
    return loads


def loads_of_model(recipe: Recipe, path: Path) -> RecordedLoads:
    """The loads of a file for the model of a recipe. Raises EvenloadError for a file that is damaged or of another."""
    loads = read_loads(path)
    experts, do = shape_of(recipe.model).experts, "give the recipe of the run that recorded it"
    if experts is None:
        raise EvenloadError("--loads is for models with experts", f"model.family {recipe.model.family}, dense", do)
    recorded = {"experts": loads.num_experts, "topk": loads.topk, "layers": list(loads.layers)}
    wanted = {"experts": experts.num_experts, "topk": experts.topk, "layers": list(experts.layers)}
    other = [name for name in wanted if wanted[name] != recorded[name]]
    detail = "; ".join(f"{name} {recorded[name]}, the recipe's {wanted[name]}" for name in other)
    refuse_first((bool(other), f"{loads.name} is of another model", detail, do))
    return loads


def mean_imbalance(recipe: Recipe, chain: PlanChain, loads: RecordedLoads) -> float:
    """Tokens at experts of the busiest rank over those of the mean one, in the mean of layers and passes, as the
    recipe's planner of layers has them, or experts at home. Raises EvenloadError as `replay` does."""
    late_steps = _late_steps(recipe)
    passes = _passes_of(loads.in_groups(chain.context.layout.ep), chain.context, late_steps)
    plugin, config = next(iter(chain.of_layers), (None, None))
    looks_back = plugin is not None and plugin.needs_loads is not None and plugin.needs_loads(config, "")
    policy_of: PolicyOf = (lambda incoming, _: incoming) if plugin is None else _with(plugin.plan, config)
    none = StepPlan(as_lengths([]), (), chain.caps)
    return float(_replayed(passes, none, policy_of, late_steps if looks_back else 0).ratios.mean())


def replay(recipe: Recipe, chain: PlanChain, plan: StepPlan, loads: RecordedLoads) -> Replay:
    """Replay loads for the ``chain`` of a recipe, one of whose plans is ``plan``: policies are as for this one. Raises
    EvenloadError where they cannot be regrouped for the recipe's ``parallel.ep``."""
    context = chain.context
    assert context.experts is not None
    late_steps = _late_steps(recipe)
    passes = _passes_of(loads.in_groups(context.layout.ep), context, late_steps)
    planners: dict[str, Replayed] = {}
    notes = []
    enabled = {plugin.name for plugin, _ in chain.of_layers}
    for name, policy_of, looks_back in _planners(recipe):
        try:
            planners.setdefault(name, _replayed(passes, plan, policy_of, late_steps if looks_back else 0))
        except EvenloadError as error:
            if name in enabled:
                raise
            notes.append(f"{name} is left out: {error.what} ({error.found})")
    idle = [one.name for one in registered() if isinstance(one, LayerPlugin) and one.name not in enabled]
    notes += [f"plugins.{name} is not enabled: its row says what it would do" for name in idle]
    steps = tuple(dict.fromkeys(one.step for one in passes))
    return Replay(loads, context.layout.ep, steps, context.experts.weight_bytes, planners, tuple(notes))


def _late_steps(recipe: Recipe) -> int:
    """How many of the newest steps are not known where a step is planned."""
    return 2 if recipe.planner.background else 1


class _Pass(NamedTuple):
    """One pass of a group, with what planners know that look back."""

    step: int
    context: PlanningContext
    counts: Ints
    """[layers, ranks, experts]."""


def _passes_of(groups: dict[int, npt.NDArray[np.int64]], context: PlanningContext, late_steps: int) -> list[_Pass]:
    """Passes of the steps before which ``late_steps`` others are known, if there are so many; of at most
    `_MOST_LAYERS`."""
    assert context.experts is not None
    histories: list[Loads] = [()] * late_steps
    passes = []
    for step, of_step in groups.items():
        known = replace(context, experts=context.experts._replace(loads=histories[-late_steps]))
        passes += [_Pass(step, known, counts) for counts in of_step]
        histories.append(updated(histories[-1], of_step.sum(axis=(0, 2), dtype=np.float64)))
    first = list(groups)[late_steps] if len(groups) > late_steps else 0
    passes = [one for one in passes if one.step >= first]
    most = max(1, _MOST_LAYERS // len(context.experts.layers))
    return [passes[place] for place in np.linspace(0, len(passes) - 1, min(most, len(passes))).astype(int)]


def _planners(recipe: Recipe) -> Iterator[tuple[str, PolicyOf, bool]]:
    """(name, planner, whether it looks back) of every plugin that plans layers, and of its baselines."""
    for plugin in registered():
        if isinstance(plugin, LayerPlugin):
            config, rows = recipe.config_of(plugin.name), plugin.baselines.rows
            for name in ("", *rows):
                looks_back = plugin.needs_loads is not None and plugin.needs_loads(config, name)
                yield name or plugin.name, _with(rows[name].plan if name else plugin.plan, config), looks_back


def _with(plan: Callable[[StepPlan, PlanningContext, Any], StepPlan], config: Any) -> PolicyOf:
    return lambda incoming, context: plan(incoming, context, config)


def _replayed(passes: Sequence[_Pass], plan: StepPlan, policy_of: PolicyOf, late_steps: int) -> Replayed:
    """Raises EvenloadError where the planner cannot plan, PlanError where it breaks a law."""
    policies: dict[int, ExpertPolicy] = {}
    rows = []
    for step, context, counts in passes:
        key = step if late_steps else 0
        if key not in policies:
            planned = policy_of(plan.revised(experts=EXPERTS_AT_HOME), context)
            check_policy(planned)
            policies[key] = planned.experts
        assert context.experts is not None
        layers = zip(context.experts.layers, counts, strict=True)
        cost = layer_cost(context, keep=policies[key].keep, once_topk=policies[key].once_topk)
        rows.append([_of_layer(policies[key], layer, counts, cost) for layer, counts in layers])
    (policy, *_) = policies.values()
    ratios, copies, slots, seconds, layer_s, exposed_s = np.moveaxis(np.array(rows, dtype=np.float64), 2, 0)
    return Replayed(
        ratios,
        copies,
        int(slots.max()),
        float(np.median(seconds)),
        float(layer_s.mean()),
        float(exposed_s.mean()),
        policy.planner,
        late_steps if any(policy.copies for policy in policies.values()) else 0,
    )


def _of_layer(
    policy: ExpertPolicy, layer: int, counts: Ints, cost: LayerCost | None
) -> tuple[float, int, int, float, float, float]:
    """Busiest over mean rank, copies of the group, the most of a rank, the seconds that the planner took, those of the
    layer and of its copies' travel, from the tokens of each rank for each expert."""
    copies, planner = policy.copies_of(layer), layer_planner(policy.planner)
    start = time.perf_counter()
    quotas = planner(counts, policy, copies)
    taken_s = time.perf_counter() - start
    check_quotas(quotas, counts, policy, copies)
    fetched = [len(experts) for experts in copies_of(quotas)]
    predicted = layer_seconds(counts, quotas, cost) if cost else None
    predicted_s = (predicted.total, predicted.moving) if predicted else (np.nan, np.nan)
    return imbalance_of(quotas), sum(fetched), max(fetched), taken_s, *predicted_s
