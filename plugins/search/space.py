"""All settings that a search compares: layouts of so many ranks, the trainer's own choices, caps, plugins.

An axis is a key of the recipe and its values. Layout and recomputation are core's; a trainer's row names its own
(`Trainer.tries`), and a plugin's says which values of its section are worth trying on a layout (`StepPlugin.tries`).
What the rules of recipe or trainer refuse is no setting, and the rule is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from ...core.costs.context import PlanningContext
from ...core.errors import EvenloadError, nearest, refuse_first, shown
from ...core.machine.layout import Layout
from ...core.plan.step_plan import Lengths
from ...core.planning.chain import PlanChain
from ...core.planning.judge import budget_bytes
from ...core.planning.stage_layers import settled
from ...core.recipe.recipe import Recipe
from ...core.recipe.traits import trainer_called
from ...core.registry import StepPlugin, registered

CAP = "max_tokens"
"""The axis of the tokens that a rank may hold in a micro-batch, of all enabled plugins at once,"""
CAPS = tuple(1024 << power for power in range(6))
"""and its values."""

Values = Mapping[str, Any]
"""A value on each axis."""
Known = Callable[[Recipe, PlanChain], PlanChain]
"""The planners of a setting with what is known of its batches besides their lengths."""


class SearchBatch(NamedTuple):
    """A global batch that every setting is planned for."""

    lengths: Lengths
    """[S] in tokens."""
    tenants: Lengths | None = None
    """Number of each sequence's tenant [S]; None: there are none."""


@dataclass(frozen=True)
class Choice:
    """One setting of the space, and the planners that come of it."""

    values: Values
    recipe: Recipe
    chain: PlanChain

    @property
    def numbers(self) -> Values:
        """Layers of each stage where they are not on an axis as such."""
        layers = self.recipe.parallel.layers
        return {"parallel.layers": list(layers)} if isinstance(layers, tuple) else {}

    def lacking_bytes(self, batch: Lengths) -> float:
        """What a device lacks for any plan of the batch; not positive: nothing that is known before there is one."""
        chain, limits = self.chain, self.chain.caps
        whole = limits.max_tokens * (limits.num_ranks if chain.shares else 1)
        # Keys and values of all slices but the last wait for it on the ranks that share the sequence.
        waiting = max(0, int(batch.max(initial=0)) - whole) * limits.memory.kv_bytes_per_token
        return limits.memory.pass_bytes + waiting - budget_bytes(limits, chain.context)

    def among(self, contexts: dict[Layout, list[PlanningContext]]) -> Choice:
        """The setting with an earlier one's context where it is equal, since what follows from one is kept with it."""
        alike = contexts.setdefault(self.chain.context.layout, [])
        if self.chain.context not in alike:
            alike.append(self.chain.context)
        context = alike[alike.index(self.chain.context)]
        return replace(self, chain=replace(self.chain, context=context))

    def settled(self, batch: SearchBatch, known: Known) -> Choice:
        """The setting with numbers in place of ``parallel.layers: auto``, for batches like this one."""
        ranks = self.chain.context.layout.world_size
        recipe = settled(self.recipe, ranks, batch.lengths, neighbours=False)
        if recipe is self.recipe:
            return self
        return Choice(self.values, recipe, known(recipe, PlanChain.of_recipe(recipe, recipe.layout(ranks))))


@dataclass(frozen=True)
class Space:
    """The settings, and those that are none, each with the rule that says so."""

    axes: Mapping[str, tuple[Any, ...]]
    choices: tuple[Choice, ...]
    refused: tuple[tuple[Values, EvenloadError], ...]

    def settled(self, batch: SearchBatch, known: Known = lambda _, chain: chain) -> Space:
        """The space with every setting for batches like this one."""
        return replace(self, choices=tuple(choice.settled(batch, known) for choice in self.choices))


def space_of(recipe: Recipe, num_ranks: int, pins: Values, known: Known = lambda _, chain: chain) -> Space:
    """The settings of so many ranks.

    Args:
        pins: values of axes that are not searched.
        known: asked for every setting; one that it refuses is none.

    Raises:
        EvenloadError: a pin names no axis, or a value that is not on it; or no setting is lawful.
    """
    choices, refused = dict[str, Choice](), list[tuple[Values, EvenloadError]]()
    axes: dict[str, list[Any]] = {}
    contexts: dict[Layout, list[PlanningContext]] = {}
    for values in _points(recipe, num_ranks):
        for key, value in values.items():
            axes.setdefault(key, []).append(value)
        if any(values.get(key, value) != value for key, value in pins.items()):
            continue
        try:
            choice = _choice(recipe, num_ranks, values, known)
        except EvenloadError as error:
            refused.append((values, error))
        else:
            choices.setdefault(choice.recipe.model_dump_json(), choice.among(contexts))
    on_axes = {key: tuple(dict.fromkeys(tried)) for key, tried in axes.items()}
    for key, value in pins.items():
        if value not in on_axes.get(key, ()):
            there = shown(list(on_axes[key])) if key in on_axes else nearest(key, on_axes)
            raise EvenloadError("a pin is outside of its axis", f"--pin {key}={shown(value)}", f"on the axis: {there}")
    if not choices:
        what, detail = f"no setting of {num_ranks} ranks is lawful", f"{refused[0][1].what} ({refused[0][1].found})"
        raise EvenloadError(what, detail, "pin less, or choose another --nproc")
    return Space(on_axes, tuple(choices.values()), tuple(refused))


def _points(recipe: Recipe, num_ranks: int) -> Iterator[Values]:
    """Every value of an axis with every one of the others, those of plugins as the layout has them."""
    degrees = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    experts = recipe.model.moe.num_experts if recipe.model.moe else 1
    layouts = {
        "parallel.tp": [size for size in degrees if recipe.model.num_attention_heads % size == 0],
        "parallel.pp": [size for size in degrees if recipe.model.num_layers >= size],
        "parallel.ep": [size for size in degrees if experts % size == 0],
    }
    others = {**trainer_called(recipe.trainer).tries, CAP: CAPS}
    for tp, pp, ep in product(*layouts.values()):
        if num_ranks % (tp * pp):
            continue
        layout = Layout(tp, pp, 1, ep, num_ranks // (tp * pp))
        steps = [plugin for plugin in registered() if isinstance(plugin, StepPlugin) and plugin.tries]
        tried = {plugin.name: plugin.tries(layout) for plugin in steps if plugin.tries}
        of_plugins = {f"plugins.{name}.{key}": some for name, keys in tried.items() for key, some in keys.items()}
        # Where plans say what is recomputed, the recipe need not.
        ordered = any("orders" in plugin.decides and tried[plugin.name].get("enabled") == (True,) for plugin in steps)
        axes = {"train.recompute": (False,) if ordered else (False, True), **others, **of_plugins}
        degrees_at: dict[str, Any] = {"parallel.tp": tp, "parallel.pp": pp, "parallel.ep": ep}
        if recipe.model.num_layers % pp:
            degrees_at["parallel.layers"] = "auto"
        for values in product(*axes.values()):
            yield {**degrees_at, **dict(zip(axes, values, strict=True))}


def _choice(recipe: Recipe, num_ranks: int, values: Values, known: Known) -> Choice:
    changes = {key: value for key, value in values.items() if key != CAP}
    for plugin in registered():
        on = values.get(f"plugins.{plugin.name}.enabled", recipe.config_of(plugin.name).enabled)
        if on and CAP in plugin.config.model_fields:
            changes[f"plugins.{plugin.name}.{CAP}"] = values[CAP]
    own_layers = {"parallel.layers": None} if recipe.parallel.layers else {}
    changed = recipe.changed({**own_layers, **changes, "parallel.dp": None, "parallel.cp": 1})
    refuse_first(*trainer_called(changed.trainer).run_rules(changed))
    return Choice(values, changed, known(changed, PlanChain.of_recipe(changed, changed.layout(num_ranks))))
