"""The mathematics without an engine, in float64: packs give the loss and gradients of whole sequences, one by one."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice, as_lengths
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.engine.stage import call_of
from evenload.integrations.deepspeed.plain import plain_gradients, relative_error
from evenload.integrations.host.scoring import token_losses
from evenload.integrations.huggingface import attention
from evenload.runtime.attention.pack import build_pack

LENGTHS = (5, 19, 3, 8)
TOKENS = [np.random.default_rng(i).integers(0, 97, n) for i, n in enumerate(LENGTHS)]
TARGETS = sum(LENGTHS) - len(LENGTHS)


def _models(family):
    model = {"family": family, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
    if family != "gpt":
        model["num_query_groups"] = 2
    recipe = recipes.parse({"trainer": "deepspeed", "model": model})
    return build_model(recipe).double(), build_model(recipe, attn_implementation="sdpa").double()


def _pack(ids=(0, 1, 2, 3), pad_to=0):
    return build_pack(MicroBatch(tuple(Slice(i, 0, LENGTHS[i]) for i in ids), (0,), pad_to), TOKENS.__getitem__)


def _gradients(model, packs, order):
    """Gradients of the mean token loss; `order` holds ("F" | "B", pack)."""
    model.zero_grad(set_to_none=True)
    losses, total = {}, 0.0
    for kind, index in order:
        if kind == "F":
            logits_TV = model(**call_of(packs[index])).logits[0]
            losses[index] = token_losses(logits_TV, packs[index], reduction="sum") / TARGETS
            total += float(losses[index].detach())
        else:
            losses.pop(index).backward()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def _in_turn(packs):
    return [(kind, i) for i in range(len(packs)) for kind in "FB"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt"])
def test_any_packing_is_exact(family):
    packed, plain = _models(family)
    loss, wanted = plain_gradients(plain, TOKENS.__getitem__, as_lengths(LENGTHS))
    assert len(wanted) == len(list(packed.parameters()))
    for packs in ([_pack()], [_pack((2, 0)), _pack((1, 3))], [_pack((0, 1), 19), _pack((2, 3), 8)]):
        found_loss, found = _gradients(packed, packs, _in_turn(packs))
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert relative_error(found, wanted) < 1e-9


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_replay_runs_under_the_pack_of_its_own_forward(reentrant):
    packed, plain = _models("llama")
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    _, wanted = plain_gradients(plain, TOKENS.__getitem__, as_lengths(LENGTHS))
    # Two packs of one size: under the other's borders a replay would run, and be wrong.
    packs = [_pack((0, 3), 8), _pack((2,), 16), _pack((1,))]
    _, found = _gradients(packed, packs, [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 2), ("B", 1)])
    assert relative_error(found, wanted) < 1e-9


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"segments": (0, 7, 24, 27, 35)}, id="moved border"),
        pytest.param({"positions_T": torch.arange(sum(LENGTHS)) // 2}, id="wrong positions"),
        pytest.param({"segments": (0, sum(LENGTHS))}, id="no border"),
        pytest.param({"labels_T": torch.cat([torch.tensor([-100]), _pack().labels_T[1:]])}, id="dropped token"),
    ],
)
def test_mutants_are_caught(change):
    packed, plain = _models("llama")
    _, wanted = plain_gradients(plain, TOKENS.__getitem__, as_lengths(LENGTHS))
    pack = dataclasses.replace(_pack(), **change)
    assert relative_error(_gradients(packed, [pack], [("F", 0), ("B", 0)])[1], wanted) > 1e-3


def test_a_dummy_gives_a_loss_and_gradients_of_exactly_zero():
    packed, _ = _models("qwen3")
    loss, found = _gradients(packed, [build_pack(MicroBatch((), ()), TOKENS.__getitem__)], [("F", 0), ("B", 0)])
    assert loss == 0
    assert len(found) == len(list(packed.parameters()))
    assert all(not g.any() for g in found.values())


def _call(**changes):
    pack = _pack()
    q = torch.zeros(1, 4, pack.num_padded_tokens, 8)
    arguments = {"attention_mask": None, "scaling": 0.3, "evenload_pack": pack, **changes}
    return attention.attention(changes.pop("module", torch.nn.Identity()), q, q, q, **arguments)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"evenload_pack": None}, "without a pack"),
        ({"attention_mask": torch.zeros(1, 1, 35, 35)}, "attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"evenload_pack": _pack((0, 1))}, "not those of its pack"),
    ],
)
def test_what_is_not_plain_causal_attention_is_refused(change, told):
    with pytest.raises(EvenloadError, match=told):
        _call(**change)


def test_a_window_as_long_as_the_sequences_is_no_window():
    out, weights = _call(sliding_window=19)
    assert out.shape == (1, 35, 4, 8)
    assert weights is None


def test_a_module_that_is_not_causal_is_refused():
    module = torch.nn.Identity()
    module.is_causal = False
    with pytest.raises(EvenloadError, match="not causal"):
        attention.attention(module, *[torch.zeros(1, 4, 35, 8)] * 3, None, evenload_pack=_pack())


def test_sequences_beyond_the_reach_of_rotary_tables_are_refused():
    module = torch.nn.Identity()
    module.config = SimpleNamespace(rope_parameters={"rope_type": "dynamic"}, max_position_embeddings=18)
    with pytest.raises(EvenloadError, match="beyond 18 tokens depend on the pack, a sequence of 19"):
        attention.attention(module, *[torch.zeros(1, 4, 35, 8)] * 3, None, evenload_pack=_pack())


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
    one, two = build_model(recipe), build_model(recipe)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = build_model(recipe.changed({"train.seed": 5}))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    one.config.save_pretrained(tmp_path)
    read = build_model(recipe.changed({"model.config": str(tmp_path / "config.json")}))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), read.parameters(), strict=True))


@pytest.mark.parametrize(
    ("text", "told"), [("", "is not JSON"), ("{}", "no causal"), ('{"model_type": "llamma"}', "llama")]
)
def test_a_config_that_is_none_is_refused(tmp_path, text, told):
    (tmp_path / "config.json").write_text(text)
    recipe = recipes.parse({"trainer": "deepspeed", "model": {"config": str(tmp_path / "config.json")}})
    with pytest.raises(EvenloadError, match=told):
        build_model(recipe)


def test_an_unknown_vocabulary_is_refused():
    with pytest.raises(EvenloadError, match=r"model\.vocab_size"):
        build_model(recipes.parse({"trainer": "deepspeed"}))
