"""Attention of packs under Transformers: a replay has its own pack, what is not plain and causal is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.host.scoring import token_losses
from evenload.runtime.attention.pack import build_pack
from harness.lazy import LazyModule

engine = LazyModule("evenload.integrations.deepspeed.engine.model")
stage = LazyModule("evenload.integrations.deepspeed.engine.stage")
plain_training = LazyModule("evenload.integrations.deepspeed.plain")
attention = LazyModule("evenload.integrations.huggingface.attention")

LENGTHS = (5, 19, 3, 8)
TOKENS = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(LENGTHS)]


def _pack(ids=(0, 1, 2, 3), pad_to=0):
    return build_pack(MicroBatch(tuple(Slice(i, 0, LENGTHS[i]) for i in ids), (0,), pad_to), TOKENS.__getitem__)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_replay_runs_under_the_pack_of_its_own_forward(reentrant):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
    recipe = recipes.parse({"trainer": "deepspeed", "model": sizes})
    packed, plain = engine.build_model(recipe).double(), engine.build_model(recipe, attn_implementation="sdpa").double()
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    _, wanted = plain_training.plain_gradients(plain, TOKENS.__getitem__, as_lengths(LENGTHS))
    # Two packs of one size: under the other's borders a replay would run, and be wrong.
    packs = [_pack((0, 3), 8), _pack((2,), 16), _pack((1,))]
    losses = [token_losses(packed(**stage.call_of(pack)).logits[0], pack, reduction="sum") for pack in packs]
    for place in (0, 2, 1):
        (losses[place] / (sum(LENGTHS) - len(LENGTHS))).backward()
    assert plain_training.relative_error({name: p.grad for name, p in packed.named_parameters()}, wanted) < 1e-9


def _module(**attributes):
    module = torch.nn.Identity()
    vars(module).update(attributes)
    return module


DYNAMIC = SimpleNamespace(rope_parameters={"rope_type": "dynamic"}, max_position_embeddings=18)


def _call(module=None, **changes):
    q = torch.zeros(1, 4, sum(LENGTHS), 8)
    return attention.attention(
        module or _module(), q, q, q, **{"attention_mask": None, "evenload_pack": _pack(), **changes}
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"evenload_pack": None}, "without a pack"),
        ({"attention_mask": torch.zeros(1, 1, 35, 35)}, "attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"evenload_pack": _pack((0, 1))}, "not those of its pack"),
        ({"module": _module(is_causal=False)}, "not causal"),
        ({"module": _module(config=DYNAMIC)}, "beyond 18 tokens depend on the pack, a sequence of 19"),
    ],
)
def test_what_is_not_plain_causal_attention_is_refused(change, told):
    with pytest.raises(EvenloadError, match=told):
        _call(**change)


def test_a_window_as_long_as_the_sequences_is_no_window():
    out, weights = _call(sliding_window=19)
    assert out.shape == (1, 35, 4, 8)
    assert weights is None


def test_registering_has_an_inverse():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention.register()
    attention.register()
    assert ALL_ATTENTION_FUNCTIONS[attention.NAME] is attention.attention
    attention.unregister()
    assert attention.NAME not in ALL_ATTENTION_FUNCTIONS
    attention.unregister()


def test_weights_come_from_the_seed_alone(tmp_path):
    recipe = recipes.parse({"trainer": "deepspeed", "model": {"hidden_size": 32, "vocab_size": 97}})
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    one, two = engine.build_model(recipe), engine.build_model(recipe)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = engine.build_model(recipe.changed({"train.seed": 5}))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    one.config.save_pretrained(tmp_path)
    read = engine.build_model(recipe.changed({"model.config": str(tmp_path / "config.json")}))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), read.parameters(), strict=True))


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "is not JSON"), ("{}", "not a causal"), ('{"model_type": "llamma"}', "llama"), (None, r"model\.vocab_size")],
)
def test_a_config_that_is_none_is_refused(tmp_path, text, told):
    recipe = recipes.parse({"trainer": "deepspeed"})
    if text is not None:
        (tmp_path / "config.json").write_text(text)
        recipe = recipe.changed({"model.config": str(tmp_path / "config.json")})
    with pytest.raises(EvenloadError, match=told):
        engine.build_model(recipe)
