"""Layers of pipeline stages as a recipe says them, and what it may not say."""

import itertools

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.stages import least_maximal


def recipe(layers, pp=4, **model):
    return parse({"model": {"num_layers": 32, "vocab_size": 256, **model}, "parallel": {"pp": pp, "layers": layers}})


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0.0, 0.3, 1.0, 2.6])
def test_no_numbers_have_a_smaller_largest_stage(stages, head):
    for total in range(stages, 11):
        layers = least_maximal(total, stages, head)
        assert sum(layers) == total
        assert len(layers) == stages
        divisions = itertools.product(range(1, total + 1), repeat=stages)
        least = min(max(*one[:-1], 0, one[-1] + head) for one in divisions if sum(one) == total)
        assert max(*layers[:-1], 0, layers[-1] + head) == least


def test_equal_numbers_are_a_recipe_without_them():
    said, plain = recipe([8, 8, 8, 8]), recipe(None)
    assert said.layout(4) == plain.layout(4)
    assert PlanChain.of_recipe(said, said.layout(4)).limits == PlanChain.of_recipe(plain, plain.layout(4)).limits


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    assert recipe("auto").layout(4).layers == ()
    *others, last = recipe("auto", hidden_size=64, num_attention_heads=4, vocab_size=200_000).layout(4).layers
    assert last == 1
    assert max(others) - min(others) <= 1
    assert recipe("auto", num_layers=31).layout(4).layers == (8, 8, 8, 7)
    assert recipe("auto", num_layers=29).layout(4).layers == (8, 7, 7, 7)


@pytest.mark.parametrize(
    ("layers", "pp", "told"),
    [
        ([9, 8, 8, 8], 4, "parallel.layers [9, 8, 8, 8] are 33, model.num_layers 32"),
        ([16, 16], 4, "parallel.layers [16, 16], parallel.pp 4"),
        ([32], 1, "parallel.layers [32], parallel.pp 1"),
        ("auto", 1, "parallel.layers auto, parallel.pp 1"),
        ("auto", 40, "32 layers, parallel.pp 40"),
        ([8, 8, 16, 0], 4, "parallel.layers"),
        ("some", 4, "parallel.layers"),
        ([], 4, "parallel.layers [], parallel.pp 4"),
    ],
)
def test_what_divides_no_model_is_refused(layers, pp, told):
    with pytest.raises(EvenloadError) as caught:
        recipe(layers, pp)
    assert told in str(caught.value)


def test_two_stages_on_each_device_have_equally_many():
    with pytest.raises(EvenloadError, match="two stages on each device"):
        parse(
            {
                "model": {"num_layers": 32},
                "parallel": {"pp": 4, "layers": [9, 8, 8, 7]},
                "plugins": {"pipeline": {"enabled": True, "v_shape": True}},
            }
        )


def test_a_stage_has_its_own_layers_and_their_bytes():
    chain = PlanChain.of_recipe(recipe([10, 8, 8, 6]), recipe([10, 8, 8, 6]).layout(4))
    equal = PlanChain.of_recipe(recipe(None), recipe(None).layout(4))
    for stage, own in enumerate((10, 8, 8, 6)):
        limits = chain.limits.at(stage)
        assert (limits.layers_per_stage, limits.layers) == (own, ())
        for name in ("activation_bytes_per_token", "kv_bytes_per_token", "fixed_bytes"):
            mean = getattr(equal.limits.memory, name)
            assert getattr(limits.memory, name) == pytest.approx(mean * own / 8)
        assert limits.memory.head_bytes_per_token == equal.limits.memory.head_bytes_per_token
