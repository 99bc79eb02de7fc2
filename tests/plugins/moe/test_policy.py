"""What the moe plugin makes of costs and cluster: when copies pay, which ranks share a node."""

from dataclasses import replace

import pytest
from evenload.api import load_plugins
from evenload.core.plan.expert_policy import EXPERTS_AT_HOME
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import load, parse
from evenload.core.simulate.experts import layer_cost, node_ranks_of

LENGTHS = as_lengths([1000, 1500, 500, 2000, 1024, 700, 300, 1800, 900, 1100, 1300, 400])


def chain_of(cluster, ep=8, dp=64, **moe):
    load_plugins()
    experts = {"num_experts": 128, "topk": 8, "ffn_hidden_size": 1536}
    model = {"family": "qwen3_moe", "num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "moe": experts}
    plugins = {"packing": {"enabled": True, "max_tokens": 8192}, "moe": {"enabled": True, **moe}}
    recipe = parse(
        {
            "model": model,
            "parallel": {"dp": dp, "ep": ep},
            "train": {"dtype": "bf16"},
            "cluster": cluster,
            "plugins": plugins,
        }
    )
    return PlanChain.of_recipe(recipe, recipe.layout())


def policy_in(chain, tokens=8192):
    return chain.plan(as_lengths([tokens] * chain.limits.num_ranks)).experts


def test_the_shipped_recipe_copies_experts_on_cpu_ranks():
    """A copy of 221,184 bytes, and its gradient, over 2 GB/s against 6.6 us a routed token: some tens of tokens."""
    load_plugins()
    recipe = load("recipes/moe.yaml", ["plugins.moe.enabled=true"])
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    policy = chain.plan(LENGTHS).experts
    assert policy.planner == "clone"
    assert 30 <= policy.least_tokens <= 60
    assert policy.tolerance == 1.0
    cost = layer_cost(chain.context)
    assert cost.weight_bytes == 4 * 3 * 96 * 192
    assert cost.forward_s == pytest.approx(2 * 3 * 96 * 192 / 5e10)
    assert cost.token_bytes == 4 * 96


def test_between_nodes_a_copy_must_take_more_tokens():
    inside, across = (policy_in(chain_of("h100", ep)) for ep in (8, 64))
    assert (inside.node_ranks, across.node_ranks) == (0, 8)
    assert 500 < inside.least_tokens < 1100 < across.least_tokens < 9900


def test_between_nodes_slots_are_what_memory_has_room_for():
    """An expert's 37.7 MB, there and its gradient back, take as long as 2,304 tokens of 8 KB on four journeys."""
    chain = chain_of("h100", ep=64)
    policy, context = policy_in(chain), chain.context
    assert (policy.keep, policy.slots, policy.copy_tokens) == (True, 16, 2304)
    assert policy_in(chain_of("h100", ep=64, slots=3)).slots == 3
    assert policy_in(chain_of("h100", ep=8)).copy_tokens == 0
    slots = []
    for times in (20, 40, 300, 1000):
        heavy = replace(context, experts=context.experts._replace(weight_bytes=times * context.experts.weight_bytes))
        policy = policy_in(replace(chain, context=heavy))
        slots.append(policy.slots)
    assert slots == sorted(slots, reverse=True)
    assert slots[0] > slots[-1] == 2


def test_local_copies_are_fetched_again_where_memory_holds_those_of_one_layer():
    chain = chain_of("h100", ep=64, once_a_node=False)
    context = chain.context
    traffic = context.traffic
    more = {"moe_layers": 400, "expert_bytes_per_token": 100 * traffic.expert_bytes_per_token}
    many = replace(context, traffic=replace(traffic, **more))
    policy = policy_in(replace(chain, context=many))
    assert not policy.keep
    assert policy.slots > 2
    assert policy.copy_tokens == 2304 * 3 // 2


def test_tokens_go_once_to_a_node_where_that_takes_less():
    """With a slot for almost every expert hardly a token leaves its node, and each leg is a collective more."""
    assert policy_in(chain_of("h100", ep=64, slots=2)).once_topk == 8
    assert policy_in(chain_of("h100", ep=64, slots=2, once_a_node=False)).once_topk == 0
    assert policy_in(chain_of("h100", ep=64)).once_topk == 0
    assert policy_in(chain_of("h100", ep=64, once_a_node=True)).once_topk == 8
    assert policy_in(chain_of("h100", ep=64, mode="reroute")).once_topk == 8
    assert policy_in(chain_of("h100", ep=64, tolerance=1.1)).once_topk == 8
    assert policy_in(chain_of("h100", ep=8, once_a_node=True)).once_topk == 0
    at_home = EXPERTS_AT_HOME._replace(node_ranks=8, once_topk=8)
    assert policy_in(chain_of("h100", ep=64, mode="auto", once_a_node=True), tokens=2) == at_home


def test_a_plan_says_when_tokens_go_once_to_a_node():
    said = {}
    for ep, wanted in ((64, True), (64, False), (8, True)):
        chain = chain_of("h100", ep=ep, once_a_node=wanted)
        said[ep, wanted] = "; ".join(chain.plan(as_lengths([8192] * chain.limits.num_ranks)).notes)
    assert "once to each node of 8 ranks" in said[64, True]
    assert "once" not in said[64, False]
    assert "without effect: plugins.moe.once_a_node true" in said[8, True]


def test_a_trainer_that_sends_to_experts_alone_sends_to_experts():
    chain = chain_of("h100", ep=64)
    unable = replace(chain.context, experts=chain.context.experts._replace(once_topk=0))
    assert policy_in(replace(chain, context=unable)).once_topk == 0


def test_groups_that_no_node_divides_count_as_one_and_pay_the_slow_link():
    chain = chain_of("h100", ep=64)
    layout = replace(chain.context.layout, ep=12, dp=24)
    context = replace(chain.context, layout=layout)
    cost = layer_cost(context)
    assert node_ranks_of(context) == 0
    assert cost.intra == chain.context.cluster.inter


def test_what_a_recipe_sets_stands():
    policy = policy_in(chain_of("h100", tolerance=1.2, slots=2))
    assert (policy.tolerance, policy.slots) == (1.2, 2)


def test_auto_leaves_experts_at_home_where_no_copy_can_pay():
    """Of 8 tokens a rank that all went to one, at 8 experts each, none would pay for an expert's 37.7 MB."""
    assert policy_in(chain_of("h100", mode="auto"), tokens=8) == EXPERTS_AT_HOME
    assert policy_in(chain_of("h100", mode="clone"), tokens=8).planner == "clone"


def test_costs_without_seconds_at_experts_ask_for_exact_loads():
    chain = chain_of("h100")
    costs = chain.context.costs.at_experts(0.0)
    policy = policy_in(replace(chain, context=replace(chain.context, costs=costs)))
    assert (policy.planner, policy.tolerance, policy.least_tokens) == ("clone", 1.0, 0)


def test_copies_are_let_go_where_memory_is_short():
    """The peak of this plan is far below the H100's memory; with weights a thousand times as large it is not."""
    chain = chain_of("h100", mode="clone")
    assert policy_in(chain).keep
    context = chain.context
    heavy = replace(context, experts=context.experts._replace(weight_bytes=1e3 * context.experts.weight_bytes))
    assert not policy_in(replace(chain, context=heavy)).keep
