"""What planners need of a recipe or a live model: the cluster, the costs of one stage, the limits of every plan, and
which samples stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..costs import costs as cost_models
from ..costs.by_setting import at_degree, at_sharding
from ..costs.context import ExpertContext, PlanningContext, Traffic
from ..costs.kept_values import shares_of_rank
from ..errors import EvenloadError
from ..input.format import GIB
from ..machine import cluster as clusters
from ..machine.layout import Layout
from ..machine.shape import Shape
from ..plan.limits import Limits
from ..plan.step_plan import Lengths
from ..recipe.recipe import RECIPES, Recipe
from ..recipe.sizes import shape_of
from ..recipe.traits import TrainerTraits, frozen, trainer_called
from ..registry import Plugin, PluginConfig, StepPlugin
from .stock import UNCAPPED


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained, as far as planners ask: of a recipe or of a live model."""

    shape: Shape
    traits: TrainerTraits
    cluster: str
    """A name in recipes/clusters or a YAML file."""
    costs: str
    """A name in recipes/costs, a YAML file, or auto."""
    recompute: bool
    frozen: bool
    """Adapters of tenants are trained, and the model stays as it is."""
    memory_gib: float | None = None
    """Of a device, in place of the cluster's."""

    @classmethod
    def of_recipe(cls, recipe: Recipe, shape: Shape | None = None, traits: TrainerTraits | None = None) -> Setting:
        """What a recipe says. ``shape``, ``traits``: of a live model, in place of the recipe's. Raises EvenloadError
        for an unknown trainer."""
        traits = traits or trainer_called(recipe.trainer).traits(recipe)
        traits = frozen(traits) if recipe.adapts else traits
        shape = shape or shape_of(recipe.model)
        again, memory_gib = recipe.train.recompute, recipe.memory_gib
        return cls(shape, traits, recipe.cluster, recipe.costs, again, recipe.adapts, memory_gib)

    def shares_of_rank(self, tp: int) -> Mapping[str, float]:
        """What a tensor-parallel rank holds (`core.costs.kept_values`)."""
        return shares_of_rank(self.shape, self.traits.value_bytes, tp, divides_tokens=self.traits.divides_tokens)


def context_of(setting: Setting, layout: Layout) -> PlanningContext:
    """Cluster, costs and traffic of one stage of one tensor-parallel rank. Raises EvenloadError for unknown names."""
    cluster = clusters.load(setting.cluster, RECIPES / "clusters")
    costs = costs_of(setting, cluster)
    instead: dict[str, Any] = {name: link for name in ("intra", "inter") if (link := getattr(costs, name))}
    if setting.memory_gib is not None:
        instead["memory_bytes"] = setting.memory_gib * GIB
    shape, traffic = setting.shape, _traffic_of(setting, layout)
    head_frac = shape.hidden_size * shape.vocab_size / shape.dense_weights
    of_stage = stage_costs(setting, costs, layout)
    machines, experts = cluster.model_copy(update=instead), _experts_of(setting)
    return PlanningContext(of_stage, layout, machines, traffic, head_frac, experts, frozen=setting.frozen)


def _experts_of(setting: Setting) -> ExpertContext | None:
    """The model's experts, of whose loads nothing is known; None in a dense model."""
    shape = setting.shape
    if shape.experts is None:
        return None
    weight_bytes = shape.mlp_weights(shape.experts.ffn_hidden_size) * setting.traits.value_bytes
    experts, topk = shape.experts, shape.experts.topk if setting.traits.dedups_per_node else 0
    return ExpertContext(experts.num_experts, experts.layers, shape.num_layers, float(weight_bytes), topk)


def costs_named(name: str) -> cost_models.Costs | None:
    """The costs of a name or a file; None for auto, which counts them. Raises EvenloadError."""
    return None if name == "auto" else cost_models.load(name, RECIPES / "costs")


def costs_of(setting: Setting, cluster: clusters.Cluster) -> cost_models.Costs:
    """The cost model for the whole model on one device. Of costs of whole training a frozen base leaves out what it
    does not do; those of a frozen base are no others' (EvenloadError)."""
    if costs := costs_named(setting.costs):
        if costs.frozen_base and not setting.frozen:
            what, do = "costs of a frozen base say nothing of training it", "profile this recipe, or name other costs"
            raise EvenloadError(what, f"costs {setting.costs}: frozen_base true", do)
        return costs.frozen().holding(**_state_bytes(setting), update_bytes=0.0) if setting.frozen else costs
    costs = cost_models.analytic(setting.shape, cluster, bytes_per_value=setting.traits.value_bytes)
    return (costs.frozen() if setting.frozen else costs).holding(**_state_bytes(setting))


def _state_bytes(setting: Setting) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states, by their fields of a memory record."""
    weights, states = setting.shape.parameters, setting.traits.states
    of_weight = {"fixed_bytes": states.fixed, "sharded_bytes": states.sharded, "gradient_bytes": states.late}
    memory = {name: float(each * weights) for name, each in of_weight.items()}
    return memory | {"gathered_bytes": states.gathered_bytes(weights)}


def stage_costs(setting: Setting, costs: cost_models.Costs, layout: Layout) -> cost_models.Costs:
    """Costs of the whole model as those of one stage of one tensor-parallel rank of a setting.

    Recomputation is the setting's, and bytes that follow from its shape and precision alone are counted.
    """
    shape, value_bytes = setting.shape, setting.traits.value_bytes
    input_bytes = float(shape.hidden_size * value_bytes)
    if setting.traits.divides_tokens:
        input_bytes /= layout.tp
    costs = at_sharding(at_degree(costs, layout.tp), setting.traits.sharding, _state_bytes(setting))
    costs = costs.of_stage(layout, setting.shares_of_rank(layout.tp))
    if setting.recompute:
        costs = costs.recomputed(_layers_per_stage(setting, layout) * input_bytes)
    costs = _with_own_experts(setting, costs, layout)
    deferred_bytes = _layers_per_stage(setting, layout) * shape.linear_values(layout.tp) * value_bytes
    expert_bytes = shape.values_at_experts * value_bytes / (layout.tp * layout.num_stages) if layout.ep > 1 else 0.0
    # Tokens that go to other ranks are copied to be sent, and copied to be sorted by expert where they arrive.
    copies = 2 * shape.experts.topk if shape.experts and layout.ep > 1 else 0
    # Divided inputs are gathered for each product with weights, into a buffer that stays.
    copies += setting.traits.divides_tokens
    whole_bytes = costs.memory.replay_bytes_per_token or costs.memory.activation_bytes_per_token
    return costs.holding(
        working_bytes_per_token=costs.memory.working_bytes_per_token + copies * shape.hidden_size * value_bytes,
        expert_bytes_per_token=min(float(expert_bytes), whole_bytes),
        kv_grad_bytes_per_token=costs.memory.kv_bytes_per_token * _kv_grad_frac(setting),
        input_bytes_per_token=input_bytes,
        deferred_bytes_per_token=float(deferred_bytes),
    )


def _with_own_experts(setting: Setting, costs: cost_models.Costs, layout: Layout) -> cost_models.Costs:
    """Costs of a stage whose ranks have an ep-th of the experts each.

    What data-parallel ranks divide is the same on each for any ep, as so many more of them have the same experts.
    """
    if layout.ep == 1 or (shape := setting.shape).experts is None:
        return costs
    traits, memory, parts = setting.traits, costs.memory, layout.tp * layout.pp
    elsewhere = shape.expert_weights * (1.0 - 1.0 / layout.ep)
    own, states = shape.parameters - elsewhere, traits.states
    less_gathered = states.gathered_bytes(shape.parameters) - states.gathered_bytes(own)
    update = 1.0 if traits.sharding != "none" else own / shape.parameters
    of_others = {
        "fixed_bytes": (states.fixed - states.sharded) * elsewhere,
        "gradient_bytes": states.late * elsewhere,
        "gathered_bytes": less_gathered,
        "update_bytes": memory.update_bytes * parts * elsewhere / shape.parameters,
    }
    less = {name: max(0.0, getattr(memory, name) - each / parts) for name, each in of_others.items()}
    return costs.holding(**less).model_copy(update={"update_s": costs.update_s * update})


def _traffic_of(setting: Setting, layout: Layout) -> Traffic:
    """What one stage of one tensor-parallel rank moves under the trainer."""
    shape, value_bytes = setting.shape, setting.traits.value_bytes
    layers = _layers_per_stage(setting, layout)
    experts = shape.expert_weights / layout.ep
    weights = (shape.parameters - shape.expert_weights + experts) / (layout.tp * layout.pp)
    routed = shape.experts.routed_per_token if shape.experts and layout.ep > 1 else 0
    attention = layers * value_bytes / layout.tp
    traits = setting.traits
    return Traffic(
        layers=layers,
        state_bytes_per_token=shape.hidden_size * value_bytes,
        handed_frac=1.0 / layout.tp if traits.divides_tokens else 1.0,
        query_bytes_per_token=shape.query_size * attention,
        kv_bytes_per_token=2 * shape.kv_size * attention,
        kv_grad_frac=_kv_grad_frac(setting),
        heads=setting.shape.heads // layout.tp,
        gradient_bytes=weights * traits.summed_bytes,
        weight_bytes=weights * value_bytes,
        expert_frac=experts / (layout.tp * layout.pp) / weights,
        expert_bytes_per_token=routed * shape.hidden_size * value_bytes / layout.pp,
        moe_layers=-(-shape.moe_layers // layout.pp),
        sharding=traits.sharding,
        overlap_gradients=traits.overlaps_gradients,
        waits_for_sends=traits.waits_for_sends,
    )


def limits_of(setting: Setting, context: PlanningContext) -> Limits:
    """What the trainer and the machine allow. The token cap is a plugin's to set."""
    layout, traits = context.layout, setting.traits
    return Limits(
        num_ranks=layout.dp_cp_size,
        max_tokens=UNCAPPED,
        num_stages=layout.num_stages,
        layers_per_stage=max(layout.layers, default=max(1, setting.shape.num_layers // layout.num_stages)),
        layers=layout.layers,
        in_step=layout.dp_cp_size if traits.all_in_step and layout.ep > 1 else layout.ep,
        all_in_step=traits.all_in_step and layout.ep == 1,
        memory=context.costs.memory,
        heads=setting.shape.heads // layout.tp,
        node_ranks=max(1, context.cluster.ranks_per_node // layout.tp),
        # Where no weight has a gradient, nothing is put off; nor where inputs are gathered for each use.
        splits_backward=layout.pp >= traits.fewest_stages_that_split and not (setting.frozen or traits.divides_tokens),
        v_shape=layout.v_shape,
    )


def _kv_grad_frac(setting: Setting) -> float:
    """dK and dV are summed in float32 where K and V are half precision (runtime.prefix)."""
    return max(1.0, 4 / setting.traits.value_bytes)


def _layers_per_stage(setting: Setting, layout: Layout) -> float:
    """How many layers a mean stage has."""
    layers, stages = setting.shape.num_layers, layout.num_stages
    return layers / stages if layout.layers else max(1, layers // stages)


MOST_PASSES = 1 << 21
"""Micro-batches times stages of a batch that are planned: some hundred bytes and some microseconds for each."""


def refuse_too_many(batch: Lengths, caps: Limits, cp: int) -> None:
    """Raise EvenloadError for a batch that is too many micro-batches under these caps of a rank."""
    cap, stages = caps.max_tokens, caps.num_stages
    fewest = -(-int(batch.sum()) // (cap * cp)) if len(batch) else 0
    if fewest * stages > MOST_PASSES:
        raise EvenloadError(
            "a batch is too many micro-batches to be planned",
            f"{fewest} of {cap} tokens at each of {stages} stages, {MOST_PASSES} may be planned over all stages",
            "raise max_tokens, lower train.global_batch_size, or shorten the samples (data.max_length)",
        )


def refuse_others(asked: bool, padded: bool, links: Sequence[tuple[Plugin, PluginConfig]]) -> None:
    """Raise EvenloadError where sequences are to stay together, in equal counts or in padded rows, and not all planners
    keep them so."""
    others = [f"plugins.{plugin.name}" for plugin, _ in links if "groups" not in plugin.decides]
    if asked and (padded or any(p.hold_back and p.hold_back(c) for p, c in links if isinstance(p, StepPlugin))):
        detail = "rows of padded micro-batches" if padded else "samples that wait for a later step"
        do = "set plugins.packing.padded=false and max_delay_steps=0, or ask for no groups (data.group)"
        raise EvenloadError("samples of a group cannot be planned one by one", detail, do)
    if padded and others:
        raise EvenloadError(
            "not every enabled plugin keeps the rows of a padded micro-batch",
            f"enabled are {', '.join(plugin.name for plugin, _ in links)}",
            f"disable {', '.join(others)}, or set plugins.packing.padded=false",
        )
    if asked and (others or not links):
        raise EvenloadError(
            "not every enabled plugin keeps samples of a group together, or ranks at equal counts of them",
            f"enabled are {', '.join(plugin.name for plugin, _ in links) or 'none'}",
            f"disable {', '.join(others)}, or ask for no groups" if others else "enable plugins.packing",
        )
