"""Experts in a recipe: their shape, and what is refused before any rank starts."""

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.rules import refuse_in_loops
from evenload.core.recipe.sizes import shape_of
from evenload.training.preflight import preflight

MOE = {"num_experts": 8, "topk": 2, "ffn_hidden_size": 96, "shared_ffn_hidden_size": 32, "every": 2}


def recipe(moe=None, **sections):
    model = {"family": "mixtral", "num_layers": 4, "hidden_size": 64, "moe": {**MOE, **(moe or {})}, "vocab_size": 256}
    return parse({"model": model, "parallel": {"dp": 2, "ep": 2}, **sections})


def test_a_loop_of_ones_own_keeps_its_experts_whole():
    asks = recipe(**CUT)
    with pytest.raises(EvenloadError, match="a training loop of your own") as caught:
        PlanChain.of_model(asks, (at := Setting.of_recipe(asks)).shape, asks.layout(), at.traits)
    assert "plugins.moe.owners=home" in caught.value.do
    with pytest.raises(EvenloadError, match="stay whole"):  # as `evenload env` asks, before there is a model
        refuse_in_loops(asks)


def test_parameters_count_every_expert_and_a_token_meets_its_own():
    shape = shape_of(recipe().model)
    assert shape.experts.num_layers == len(recipe().model.moe_layers) == 2
    one = 3 * 64 * 96
    assert shape.expert_weights == 2 * 8 * one
    assert shape.routed_weights == 2 * 2 * one
    assert shape.parameters - shape.weights == 2 * 6 * one + 64 * 256  # the others, and the embedding


PACKING = {"plugins": {"packing": {"enabled": True}}}
CUT = {"plugins": {"moe": {"enabled": True, "owners": "sharded"}}}
REFUSED = {
    "an ep that does not divide": ({"moe": {"num_experts": 9}}, "does not divide the experts"),
    "more experts than there are": ({"moe": {"topk": 9}}, "more experts than there are"),
    "a bias of softmax": ({"moe": {"bias_rate": 1e-3}}, "sigmoid"),
    "a loss of micro-batches": ({"moe": {"batch_aux_loss": 1e-2}, **PACKING}, "depends on which samples"),
    "capacity": ({"moe": {"capacity_factor": 1.2}, **PACKING}, "depends on which samples"),
    "tensor parallelism": ({"parallel": {"tp": 2, "ep": 2, "dp": 2}}, "sequence parallelism"),
    "allgather of packs": ({"moe": {"dispatcher": "allgather"}, **PACKING}, "equally many tokens"),
    "pieces of experts on one rank": ({"parallel": {"dp": 2}, **CUT}, "group of its own"),
    "pieces of experts in another trainer": ({"trainer": "deepspeed", **CUT}, "trainer megatron alone"),
    "copies in a Trainer": (
        {"trainer": "transformers", "plugins": {"moe": {"enabled": True}}},
        r"trainer transformers has no plugins\.moe",
    ),
    "an unknown key": ({"moe": {"experts": 8}}, "no key 'experts'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_compose_is_refused_before_a_rank_starts(name):
    changes, message = REFUSED[name]
    with pytest.raises(EvenloadError, match=message) as caught:
        preflight(recipe(**changes))
    if name == "an unknown key":
        assert "num_experts" in caught.value.do
