"""What a frozen base and the adapters of tenants cost, counted by hand from their shapes."""

import json
from dataclasses import replace

import pytest
from evenload.core.costs.memory import fixed_bytes
from evenload.core.errors import EvenloadError
from evenload.core.machine.layout import Layout
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.forward_only import forward_only
from evenload.core.planning.judge import judge
from evenload.core.planning.setting import Setting, context_of, limits_of
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.sizes import shape_of
from evenload.plugins.lora.costs import TenantLoad, adapter_weights, linears_of, with_tenants
from evenload.plugins.lora.profiling import ADAPTER, of_base

SIZES = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "vocab_size": 256,
}
LINEARS = 2 * (64 + 64) + 2 * (64 + 16) + 3 * (64 + 96)
"""Inputs and outputs of a layer's linear layers: q, o; k, v; gate, up, down."""


def recipe_of(lora=True, **changes):
    data = {"model": SIZES, "cluster": "h100", "plugins": {"lora": {"enabled": lora}, "packing": {"enabled": True}}}
    return parse(data).changed(changes)


def test_weights_of_adapters():
    shape = shape_of(recipe_of().model)
    assert adapter_weights(shape, Adapter(r=4)) == 4 * 4 * LINEARS
    assert adapter_weights(shape, Adapter(r=4, target_modules=("q_proj", "down_proj"))) == 4 * 4 * (128 + 160)
    patterned = Adapter(r=4, target_modules=("q_proj",), rank_pattern={"layers.0.self_attn.q_proj": 6})
    assert adapter_weights(shape, patterned) == (3 * 4 + 6) * 128


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_linear_layers_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    import torch
    from torch import nn

    recipe = recipe_of(**{"model.family": family, "model.num_query_groups": 8})
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    config = {"llama": transformers.LlamaConfig, "gpt": transformers.GPTNeoXConfig}[family](vocab_size=256, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    modules = {n: (m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    ours = {one.name: (one.inputs, one.outputs) for one in linears_of(shape_of(recipe.model))}
    assert modules.items() - ours.items() <= {(name, (64, 256)) for name in ("lm_head", "embed_out")}
    assert ours.items() <= modules.items()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_of_a_frozen_base_has_no_weight_gradients(recompute):
    whole, frozen = (
        context_of(Setting.of_recipe(recipe_of(lora, **{"train.recompute": recompute})), Layout(dp=2)).costs
        for lora in (False, True)
    )
    again = 1 if recompute else 0
    assert frozen.forward == whole.forward
    assert whole.backward.token_s == pytest.approx((2 + again) * whole.forward.token_s)
    assert frozen.backward.token_s == pytest.approx((1 + again) * whole.forward.token_s)
    assert frozen.backward.pair_s == whole.backward.pair_s
    assert frozen.update_s == 0


def test_measured_costs_lose_weight_gradients_and_what_states_take():
    whole, frozen = (
        context_of(Setting.of_recipe(recipe_of(lora, costs="cpu")), Layout(dp=2)).costs for lora in (False, True)
    )
    assert whole.model_copy(update={"update_s": 1.0}).frozen().update_s == frozen.update_s == 0
    assert frozen.backward.token_s == pytest.approx(whole.backward.token_s - whole.weights_s(1))
    assert frozen.memory.fixed_bytes == 4 * shape_of(recipe_of().model).parameters
    assert frozen.memory.update_bytes == 0
    assert frozen.memory.activation_bytes_per_token == whole.memory.activation_bytes_per_token


def test_costs_of_a_frozen_base_are_taken_as_they_are_and_for_nothing_else(tmp_path):
    pass_s = {"launch_s": 0.001, "token_s": 2.0e-5, "pair_s": 1.0e-8}
    data = {"source": "a machine", "forward": pass_s, "backward": pass_s, "update_s": 0.25, "frozen_base": True}
    file = tmp_path / "costs.yaml"
    file.write_text(json.dumps({**data, "memory": {"activation_bytes_per_token": 100.0}}))
    costs = context_of(Setting.of_recipe(recipe_of(costs=str(file))), Layout(dp=2)).costs
    assert (costs.backward.token_s, costs.update_s) == (2.0e-5, 0.25)
    assert costs.memory.activation_bytes_per_token == 100
    assert costs.memory.fixed_bytes == 4 * shape_of(recipe_of().model).parameters
    with pytest.raises(EvenloadError, match="costs of a frozen base say nothing of training it"):
        context_of(Setting.of_recipe(recipe_of(lora=False, costs=str(file))), Layout(dp=2))


@pytest.mark.parametrize(("dtype", "value"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_a_frozen_base_holds_its_weights_alone(dtype, value, stage):
    changes = {"train.dtype": dtype}
    if stage is not None:
        changes |= {"trainer": "deepspeed", "deepspeed.zero_stage": stage}
    recipe = recipe_of(**changes)
    chain = PlanChain.of_recipe(recipe, Layout(dp=4))
    weights, memory = shape_of(recipe.model).parameters, chain.context.costs.memory
    kept = memory.fixed_bytes - memory.sharded_bytes * 3 / 4
    assert kept == pytest.approx(value * weights * (1 / 4 if stage == 3 else 1))
    assert memory.gradient_bytes == memory.update_bytes == 0
    assert chain.limits.memory == memory
    assert not chain.limits.splits_backward
    assert PlanChain.of_recipe(recipe_of(lora=False), Layout(dp=4)).limits.splits_backward
    assert chain.context.traffic.gradient_bytes == 0


def plan_s(chain):
    """Seconds of a step, and those that nobody computes in."""
    candidate = judge(chain.plan(as_lengths([400, 300, 200, 100])), chain.context)
    return candidate.step_s, candidate.peak_bytes


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, pp=2), Layout(tp=2, dp=2)])
def test_what_tenants_add(layout):
    recipe = recipe_of(**{"parallel.tp": layout.tp, "parallel.pp": layout.pp})
    bare, shape = PlanChain.of_recipe(recipe, layout), shape_of(recipe.model)
    small, large = Adapter(r=4), Adapter(r=16)
    chain = with_tenants(bare, shape, [TenantLoad(small, 300), TenantLoad(large, 100)])
    sizes = adapter_weights(shape, small), adapter_weights(shape, large)
    before, after = bare.context.costs, chain.context.costs
    share = (sizes[0] * 300 + sizes[1] * 100) / 400 / shape.dense_weights
    assert after.forward.token_s == pytest.approx((1 + share) * before.forward.token_s)
    assert after.backward.token_s - before.backward.token_s == pytest.approx(2 * share * before.forward.token_s)
    parts = layout.tp * layout.pp
    held = fixed_bytes(after.memory, chain.limits) - fixed_bytes(before.memory, bare.limits)
    assert held == pytest.approx(sum(sizes) * (8 + 8 / layout.dp_cp_size) / parts)
    assert chain.limits.memory == after.memory
    assert chain.context.traffic.adapter_bytes == pytest.approx(4 * sum(sizes) / parts)
    assert with_tenants(bare, shape, []) is bare


def test_what_the_tenant_of_a_profile_takes_is_what_plans_add_for_such_a_tenant():
    recipe = recipe_of()
    chain, shape = PlanChain.of_recipe(recipe, Layout(dp=2)), shape_of(recipe.model)
    base = chain.context.costs
    joined = with_tenants(chain, shape, [TenantLoad(ADAPTER, 1.0)]).context.costs
    found = of_base(joined, shape)
    assert joined.forward.token_s > base.forward.token_s
    assert found.forward.token_s == pytest.approx(base.forward.token_s)
    assert found.backward.token_s == pytest.approx(base.backward.token_s)
    assert found.frozen_base


def test_the_sum_of_adapters_is_in_the_step_and_that_of_the_base_is_not():
    """Compute is the same in all three; what is left is the end of the step."""
    recipe, layout = recipe_of(), Layout(dp=4)
    bare, shape = PlanChain.of_recipe(recipe, layout), shape_of(recipe.model)
    chain = with_tenants(bare, shape, [TenantLoad(Adapter(r=4), 1)])
    silent = replace(chain, context=replace(chain.context, traffic=replace(chain.context.traffic, adapter_bytes=0.0)))
    link = chain.context.cluster.link_among(range(4))
    num_bytes = 4.0 * adapter_weights(shape, Adapter(r=4))
    summed_s = link.all_reduce_s(num_bytes, 4) + link.all_gather_s(num_bytes / 4, 4)
    assert plan_s(chain)[0] - plan_s(silent)[0] == pytest.approx(summed_s)
    trained = context_of(Setting.of_recipe(recipe_of(lora=False)), layout)
    thawed = replace(silent, context=replace(silent.context, frozen=False, traffic=trained.traffic))
    assert plan_s(thawed)[0] > plan_s(silent)[0]


def test_forwards_alone_sum_nothing():
    recipe = recipe_of()
    one = TenantLoad(Adapter(r=4), 1)
    scored = with_tenants(forward_only(PlanChain.of_recipe(recipe, Layout(dp=4))), shape_of(recipe.model), [one])
    assert scored.context.costs.backward.token_s == 0
    silent = replace(scored, context=replace(scored.context, traffic=replace(scored.context.traffic, adapter_bytes=0)))
    assert plan_s(scored)[0] == plan_s(silent)[0]


def test_no_backward_of_a_pipeline_is_split():
    changes = {"plugins.pipeline.enabled": True, "parallel.pp": 2}
    lengths = as_lengths([500, 400, 300, 200, 100, 50])
    frozen, whole = (PlanChain.of_recipe(recipe_of(lora, **changes), Layout(pp=2)) for lora in (True, False))
    assert not any(frozen.plan(lengths).split)
    assert frozen.limits == limits_of(Setting.of_recipe(recipe_of(**changes)), frozen.context)
    assert whole.limits.splits_backward
