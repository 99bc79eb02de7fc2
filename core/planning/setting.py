"""From a recipe to what planners need: the cluster, the costs of one stage, and the limits every plan is held to."""

from __future__ import annotations

from ..costs import costs as cost_models
from ..costs.context import ExpertContext, PlanningContext, Traffic
from ..errors import EvenloadError
from ..machine import cluster as clusters
from ..machine.layout import Layout
from ..plan.limits import Limits
from ..recipe.recipe import Recipe
from ..recipe.shipped import RECIPES
from ..recipe.sizes import VALUE_BYTES, heads_of, moe_layers_of, shape_of
from ..recipe.traits import TrainerTraits, frozen, trainer_called
from .stock import UNCAPPED


def context_of(recipe: Recipe, layout: Layout) -> PlanningContext:
    """Cluster, costs and traffic of one stage of one tensor-parallel rank. Raises EvenloadError for unknown names."""
    cluster = clusters.load(recipe.cluster, RECIPES / "clusters")
    costs = costs_of(recipe, cluster)
    measured = {name: link for name in ("intra", "inter") if (link := getattr(costs, name))}
    shape, traffic = shape_of(recipe.model), traffic_of(recipe, layout)
    head_frac = shape.hidden_size * shape.vocab_size / shape.dense_weights
    of_stage = stage_costs(recipe, costs, layout)
    machines, experts = cluster.model_copy(update=measured), experts_of(recipe)
    return PlanningContext(of_stage, layout, machines, traffic, head_frac, experts, frozen=recipe.adapts)


def experts_of(recipe: Recipe) -> ExpertContext | None:
    """The model's experts, of whose loads nothing is known; None in a dense model."""
    shape = shape_of(recipe.model)
    if shape.experts is None:
        return None
    weight_bytes = shape.mlp_weights(shape.experts.ffn_hidden_size) * VALUE_BYTES[recipe.train.dtype]
    layers = moe_layers_of(recipe.model)
    return ExpertContext(shape.experts.num_experts, layers, shape.num_layers, float(weight_bytes))


def traits_of(recipe: Recipe) -> TrainerTraits:
    """The recipe's trainer as the recipe sets it up. Raises EvenloadError."""
    traits = trainer_called(recipe.trainer).traits(recipe)
    return frozen(traits, VALUE_BYTES[recipe.train.dtype]) if recipe.adapts else traits


def costs_of(recipe: Recipe, cluster: clusters.Cluster) -> cost_models.Costs:
    """The recipe's cost model for the whole model on one device. Of costs of whole training a frozen base leaves out
    what it does not do; those of a frozen base are no others' (EvenloadError)."""
    shape = shape_of(recipe.model)
    if recipe.costs != "auto":
        costs = cost_models.load(recipe.costs, RECIPES / "costs")
        if costs.frozen_base and not recipe.adapts:
            what, do = "costs of a frozen base say nothing of training it", "profile this recipe, or name other costs"
            raise EvenloadError(what, f"costs {recipe.costs}: frozen_base true", do)
        return costs.frozen().holding(**_state_bytes(recipe), update_bytes=0.0) if recipe.adapts else costs
    costs = cost_models.analytic(shape, cluster, bytes_per_value=VALUE_BYTES[recipe.train.dtype])
    return (costs.frozen() if recipe.adapts else costs).holding(**_state_bytes(recipe))


def _state_bytes(recipe: Recipe) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer states, by their fields of a memory record."""
    weights, states = shape_of(recipe.model).parameters, traits_of(recipe).states
    of_weight = {"fixed_bytes": states.fixed, "sharded_bytes": states.sharded, "gradient_bytes": states.late}
    memory = {name: float(each * weights) for name, each in of_weight.items()}
    return memory | {"gathered_bytes": states.gathered_bytes(weights)}


def stage_costs(recipe: Recipe, costs: cost_models.Costs, layout: Layout) -> cost_models.Costs:
    """Costs of the whole model as those of one stage of one tensor-parallel rank under the recipe.

    Recomputation is the recipe's, and bytes that follow from its shape and precision alone are counted.
    """
    shape, value_bytes = shape_of(recipe.model), VALUE_BYTES[recipe.train.dtype]
    if recipe.train.recompute:
        costs = costs.recomputed(shape.num_layers * shape.hidden_size * value_bytes)
    costs = _with_own_experts(recipe, costs.of_stage(layout), layout)
    deferred_bytes = _layers_per_stage(recipe, layout) * shape.linear_values(layout.tp) * value_bytes
    expert_bytes = shape.values_at_experts * value_bytes / (layout.tp * layout.pp) if layout.ep > 1 else 0.0
    # Tokens that go to other ranks are copied to be sent, and copied to be sorted by expert where they arrive.
    copies = 2 * shape.experts.topk if shape.experts and layout.ep > 1 else 0
    whole_bytes = costs.memory.replay_bytes_per_token or costs.memory.activation_bytes_per_token
    return costs.holding(
        working_bytes_per_token=costs.memory.working_bytes_per_token + copies * shape.hidden_size * value_bytes,
        expert_bytes_per_token=min(float(expert_bytes), whole_bytes),
        kv_grad_bytes_per_token=costs.memory.kv_bytes_per_token * _kv_grad_frac(recipe),
        input_bytes_per_token=float(shape.hidden_size * value_bytes),
        deferred_bytes_per_token=float(deferred_bytes),
    )


def _with_own_experts(recipe: Recipe, costs: cost_models.Costs, layout: Layout) -> cost_models.Costs:
    """Costs of a stage whose ranks have an ep-th of the experts each. What data-parallel ranks divide is the same on
    each for any ep, as so many more of them have the same experts."""
    if layout.ep == 1 or (shape := shape_of(recipe.model)).experts is None:
        return costs
    traits, memory, parts = traits_of(recipe), costs.memory, layout.tp * layout.pp
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


def traffic_of(recipe: Recipe, layout: Layout) -> Traffic:
    """What one stage of one tensor-parallel rank moves under the recipe's trainer."""
    shape, value_bytes = shape_of(recipe.model), VALUE_BYTES[recipe.train.dtype]
    layers = _layers_per_stage(recipe, layout)
    experts = shape.expert_weights / layout.ep
    weights = (shape.parameters - shape.expert_weights + experts) / (layout.tp * layout.pp)
    routed = shape.experts.routed_per_token if shape.experts and layout.ep > 1 else 0
    attention = layers * value_bytes / layout.tp
    traits = traits_of(recipe)
    return Traffic(
        layers=layers,
        state_bytes_per_token=shape.hidden_size * value_bytes,
        query_bytes_per_token=shape.query_size * attention,
        kv_bytes_per_token=2 * shape.kv_size * attention,
        kv_grad_frac=_kv_grad_frac(recipe),
        heads=heads_of(recipe.model) // layout.tp,
        gradient_bytes=weights * traits.summed_bytes,
        weight_bytes=weights * value_bytes,
        expert_frac=experts / (layout.tp * layout.pp) / weights,
        expert_bytes_per_token=routed * shape.hidden_size * value_bytes / layout.pp,
        moe_layers=-(-shape.moe_layers // layout.pp),
        sharding=traits.sharding,
        overlap_gradients=traits.overlaps_gradients,
        waits_for_sends=traits.waits_for_sends,
    )


def limits_of(recipe: Recipe, context: PlanningContext) -> Limits:
    """What the trainer and the machine allow. The token cap is a plugin's to set."""
    layout, traits = context.layout, traits_of(recipe)
    return Limits(
        num_ranks=layout.dp_cp_size,
        max_tokens=UNCAPPED,
        num_stages=layout.pp,
        layers_per_stage=_layers_per_stage(recipe, layout),
        in_step=layout.dp_cp_size if traits.all_in_step and layout.ep > 1 else layout.ep,
        all_in_step=traits.all_in_step and layout.ep == 1,
        memory=context.costs.memory,
        heads=heads_of(recipe.model) // layout.tp,
        node_ranks=max(1, context.cluster.ranks_per_node // layout.tp),
        # Where no weight has a gradient, there is nothing to put off.
        splits_backward=layout.pp >= traits.fewest_stages_that_split and not recipe.adapts,
    )


def _kv_grad_frac(recipe: Recipe) -> float:
    """dK and dV are summed in float32 where K and V are half precision (runtime.prefix)."""
    return max(1.0, 4 / VALUE_BYTES[recipe.train.dtype])


def _layers_per_stage(recipe: Recipe, layout: Layout) -> int:
    return max(1, shape_of(recipe.model).num_layers // layout.pp)
