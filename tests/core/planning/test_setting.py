"""What a recipe with experts costs, counted by hand from its shape."""

import pytest
from evenload.core.costs.memory import fixed_bytes
from evenload.core.machine.layout import Layout
from evenload.core.planning.setting import Setting, context_of, limits_of
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.sizes import shape_of

EXPERTS = 4 * 8 * 3 * 64 * 96
"""Weights of 4 layers of 8 experts."""


def recipe_of(**changes):
    moe = {"num_experts": 8, "topk": 2, "ffn_hidden_size": 96, "shared_ffn_hidden_size": 32}
    sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    data = {"model": {"family": "mixtral", "moe": moe, **sizes}, "train": {"global_batch_size": 4}}
    return parse(data).changed(changes)


def test_weights_that_tokens_multiply():
    shape = shape_of(recipe_of().model)
    assert shape.expert_weights == EXPERTS
    assert shape.routed_weights == 4 * 2 * 3 * 64 * 96
    attention, shared, router = 4 * 64 * 64, 3 * 64 * 32, 64 * 8
    assert shape.dense_weights == 4 * (attention + shared + router) + 64 * 256
    counted = context_of(Setting.of_recipe(recipe_of()), Layout()).costs.forward
    assert counted.expert_s / counted.token_s == pytest.approx(shape.routed_weights / shape.dense_weights)


@pytest.mark.parametrize("trainer", [{"trainer": "megatron"}, {"megatron.distributed_optimizer": False}])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_rank_holds_its_experts_and_its_share_of_what_ranks_divide(trainer, ep):
    recipe, layout = recipe_of(**trainer), Layout(ep=ep, dp=4)
    context = context_of(Setting.of_recipe(recipe), layout)
    weights = shape_of(recipe.model).parameters
    sharded = 8 if recipe.megatron.distributed_optimizer else 0
    own = weights - EXPERTS + EXPERTS / ep
    expected = (16 - sharded) * own + sharded * weights / 4
    assert fixed_bytes(context.costs.memory, limits_of(Setting.of_recipe(recipe), context)) == pytest.approx(expected)
    traffic = context.traffic
    assert traffic.gradient_bytes == pytest.approx(4 * own)
    assert traffic.gradient_bytes * traffic.expert_frac == pytest.approx(4 * EXPERTS / ep)


def test_gathered_and_late_bytes_are_those_of_own_experts():
    for stage, name in ((3, "gathered_bytes"), (2, "gradient_bytes")):
        changes = {"model.moe.shared_ffn_hidden_size": 0, "trainer": "deepspeed", "deepspeed.zero_stage": stage}
        recipe = recipe_of().changed(changes)
        weights = shape_of(recipe.model).parameters
        held = [getattr(context_of(Setting.of_recipe(recipe), Layout(ep=ep, dp=4)).costs.memory, name) for ep in (1, 4)]
        assert held == [4 * weights, pytest.approx(4 * (weights - EXPERTS * 3 / 4))]


def test_tokens_travel_where_ranks_share_experts():
    alone, shared = (context_of(Setting.of_recipe(recipe_of()), Layout(pp=2, ep=ep, dp=2)).traffic for ep in (1, 2))
    assert alone.expert_bytes_per_token == 0
    assert shared.expert_bytes_per_token == 2 * 2 * 64 * 4
    assert shared.moe_layers == 2


def test_what_waits_for_weight_gradients_is_no_expert_s():
    dense = recipe_of().changed({"model.family": "llama", "model.moe": None, "model.ffn_hidden_size": 32})
    held, costs = [], []
    for recipe in (recipe_of(), dense):
        context = context_of(Setting.of_recipe(recipe), Layout(ep=1, dp=2))
        held.append(context.costs.memory.deferred_bytes_per_token)
        costs.append(context.costs.weights_s(100, context.head_frac))
    # A shared expert is a dense layer of its size; the router's weights are not told apart from dense ones.
    router = 2 * 100 * 4 * 64 * 8 / context.cluster.flops_per_s
    assert held[0] == held[1]
    assert costs[0] == pytest.approx(costs[1] + router)


def test_the_part_of_activations_at_experts():
    alone, shared = (context_of(Setting.of_recipe(recipe_of()), Layout(ep=ep, dp=2)).costs.memory for ep in (1, 2))
    assert alone.expert_bytes_per_token == 0
    assert shared.expert_bytes_per_token == 4 * 4 * 2 * (64 + 6 * 96)
    assert shared.activation_bytes_per_token == alone.activation_bytes_per_token
    # Tokens as they go out and as they are sorted by expert.
    assert shared.working_bytes_per_token - alone.working_bytes_per_token == 2 * 2 * 64 * 4
