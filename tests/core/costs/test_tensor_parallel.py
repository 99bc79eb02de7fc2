"""What a tensor-parallel rank holds, against what real layers kept and against counts by hand."""

import pytest
from evenload.core.costs.kept_values import shares_of_rank
from evenload.core.machine.layout import Layout
from evenload.core.machine.shape import ExpertShape, Shape
from evenload.core.plan.limits import AMOUNTS, MemoryCost
from evenload.core.planning.setting import Setting, context_of
from evenload.core.recipe.recipe import parse
from hypothesis import given
from hypothesis import strategies as st

LLAMA = Shape(4, 256, 704, 256, 256, 64, gated=True, heads=8)
ACTIVATIONS = "activation_bytes_per_token"

shapes = st.builds(
    lambda layers, heads, gated, experts: Shape(
        layers, 64 * heads, 96 * heads, 64 * heads, 64 * heads, 512, gated, heads=heads, experts=experts
    ),
    st.integers(1, 4),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from([None, ExpertShape(8, 2, 96, 32, (0,))]),
)
degrees = st.sampled_from([2, 4, 8])


@pytest.mark.parametrize(("tp", "measured"), [(2, 0.625), (4, 0.438)])
def test_a_rank_keeps_what_real_layers_kept(tp, measured):
    """Megatron's own local layers in float32: bytes on a rank over those of one rank with the whole model."""
    share = shares_of_rank(LLAMA, 4, tp, divides_tokens=False)[ACTIVATIONS]
    assert share == pytest.approx(measured, rel=0.03)


@given(shapes, degrees)
def test_divided_tokens_leave_less_and_a_rank_always_has_more_than_its_part(shape, tp):
    whole, divided = (shares_of_rank(shape, 2, tp, divides_tokens=divides) for divides in (False, True))
    assert whole.keys() == divided.keys() <= set(AMOUNTS)
    for name, share in divided.items():
        assert 1 / tp <= share <= whole[name] + 1e-12
        assert whole[name] < 1
    assert divided[ACTIVATIONS] < whole[ACTIVATIONS]
    assert shares_of_rank(shape, 2, 1, divides_tokens=True) == {}


@given(shapes, degrees, st.booleans())
def test_the_bytes_of_a_rank_give_those_of_the_model_back(shape, tp, divides):
    measured = MemoryCost(**{name: float(place + 1) for place, name in enumerate(AMOUNTS)})
    shares = shares_of_rank(shape, 2, tp, divides_tokens=divides)
    again = measured.of_model(tp, shares).of_stage(Layout(tp=tp), shares)
    assert again.model_dump() == pytest.approx(measured.model_dump())


def memory_of(tp=2, **changes):
    data = {"model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}}
    recipe = parse({**data, "train": {"global_batch_size": 4}}).changed({"parallel.tp": tp, **changes})
    return context_of(Setting.of_recipe(recipe), recipe.layout(4)).costs.memory


def test_plans_of_a_recipe_are_held_to_what_its_ranks_keep():
    one, two, divided = memory_of(1), memory_of(), memory_of(**{"megatron.sequence_parallel": True})
    assert one.activation_bytes_per_token / 2 < divided.activation_bytes_per_token
    assert 1.1 * divided.activation_bytes_per_token < two.activation_bytes_per_token < one.activation_bytes_per_token
    assert divided.working_bytes_per_token == two.working_bytes_per_token + 64 * 4
    norms = 9 * 64 * 16  # weights, gradients and states
    assert two.fixed_bytes == pytest.approx((one.fixed_bytes + norms) / 2, rel=1e-9)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2


@pytest.mark.parametrize(("divides", "share"), [(False, 1.0), (True, 0.5)])
def test_a_stage_hands_on_what_its_rank_has(divides, share):
    changes = {"parallel.pp": 2, "parallel.tp": 2, "megatron.sequence_parallel": divides, "model.num_layers": 4}
    recipe = parse({"train": {"global_batch_size": 4}}).changed(changes)
    assert context_of(Setting.of_recipe(recipe), recipe.layout(4)).traffic.handed_frac == share


@pytest.mark.parametrize(("divides", "share"), [(False, 1.0), (True, 0.5)])
def test_the_inputs_of_recomputed_layers_are_whole_or_divided(divides, share):
    again, kept = (memory_of(**{"train.recompute": x, "megatron.sequence_parallel": divides}) for x in (True, False))
    inputs = share * 64 * 4
    assert again.activation_bytes_per_token == 4 * inputs
    assert again.input_bytes_per_token == kept.input_bytes_per_token == inputs
    assert again.replay_bytes_per_token == kept.activation_bytes_per_token
