"""Plans on DeepSpeed's pipelines: what their instructions are, and that gradients are those of plain training."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.machine.layout import Layout
from evenload.core.recipe import recipe as recipes
from evenload.runtime.stage.executor import StageTrainer
from harness.cases import only_full
from harness.lazy import LazyModule
from harness.proof import ROUNDING

engine = LazyModule("evenload.integrations.deepspeed.engine.model")
pipeline = LazyModule("evenload.integrations.deepspeed.pipeline.model")


def test_stages_have_equally_many_layers_or_as_many_as_are_said():
    assert pipeline._borders(4 + 3, Layout(pp=2)) == [0, 3, 7]
    assert pipeline._borders(12 + 3, Layout(pp=4)) == [0, 4, 7, 10, 15]
    assert pipeline._borders(12 + 3, Layout(pp=4, layers=(1, 5, 4, 2))) == [0, 2, 7, 11, 15]


def _recipe(**changes):
    recipe = recipes.parse({"trainer": "deepspeed", "model": {"vocab_size": 97}, "parallel": {"pp": 2}})
    return recipe.changed({key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"deepspeed__zero_stage": 2}, "zero_stage 2, parallel.pp 2"),
        ({"deepspeed__zero_stage": 0, "train__dtype": "bf16"}, "bf16, deepspeed.zero_stage 0"),
        ({"parallel__tp": 2}, "parallel.tp 2"),
        ({"parallel__pp": 3}, "pp 3, 4 layers"),
    ],
)
def test_what_no_pipeline_runs_is_refused_before_anything_starts(changes, told):
    with pytest.raises(EvenloadError) as caught:
        _recipe(**changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_hidden_layers": 3}, "3 layers, parallel.pp 2"),
        ({"model_type": "gemma"}, "model_type gemma"),
        ({"model_type": "gpt_neox", "hidden_dropout": 0.1}, "hidden_dropout = 0.1"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(tmp_path, config, told):
    recipe = _recipe(model__config=_config(tmp_path, **config))
    with pytest.raises(EvenloadError) as caught:
        pipeline._take_apart(recipe, recipe.layout(2), 0)
    assert told in str(caught.value)


def _config(folder, **own):
    shape = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    file = folder / "config.json"
    file.write_text(json.dumps({"tie_word_embeddings": False, **shape, **own}))
    return str(file)


YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    "config",
    [{}, YARN, *({"model_type": kind} for kind in ("mistral", "qwen2", "qwen3", "gpt_neox"))],
    ids=["llama", "yarn", "mistral", "qwen2", "qwen3", "gpt_neox"],
)
def test_a_stage_is_its_part_of_the_whole_and_has_memory_for_no_more(tmp_path, config):
    recipe = _recipe(model__config=_config(tmp_path, **config), data__max_length=4096)
    whole, found = engine.build_model(recipe), {}
    generator = torch.get_rng_state()
    for stage in range(2):
        parts = pipeline._take_apart(recipe, recipe.layout(2), stage)
        own = [p for layer in parts.layers for p in layer.parameters() if not p.is_meta]
        found |= {parts.names[id(p)]: p for p in own}
        assert len(own) < len(parts.names)
        rotary = dict(whole.base_model.rotary_emb.named_buffers())
        assert all(torch.equal(buffer, rotary[name]) for name, buffer in parts.rotary.named_buffers())
    wanted = dict(whole.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "names", "more"),
    [
        only_full(2, 0, ["packs", "0", "3", "4", "pipeline 5", "pipeline 6"], {}),
        (2, 1, ["packs", "2", "14", "pipeline 3"], {}),
        (2, 1, ["pipeline 3"], {"family": "qwen2", "recompute": True}),
        only_full(2, 0, ["pipeline 3"], {"family": "gpt"}),
        (2, 1, ["packs", "pipeline 3", "recomputed 16"], {"layers": [1, 3]}),
        only_full(4, 0, ["packs", "0", "pipeline 5", "idle 6", "shared 5"], {}),
        (4, 1, ["packs", "2", "idle 0", "shared 1"], {}),
        only_full(1, 1, ["recomputed 2", "recomputed 11"], {"pp": 1}),
        (1, 3, ["recomputed 2", "recomputed 11"], {"pp": 1}),
        (4, 1, ["pipeline 3"], {"pp": 4}),
        (2, 0, ["11", "pipeline 13"], {"v_shape": True, "recompute": True}),
        (4, 1, ["packs", "pipeline 3"], {"v_shape": True, "family": "qwen2"}),
        only_full(4, 1, ["pipeline 1"], {"v_shape": True, "pp": 4, "num_layers": 8}),
    ],
)
def test_stages_give_the_gradients_of_plain_training(exactness, ranks, stage, names, more):
    """Two stages but where ``more`` says one, four, or two on each device."""
    exactness(ranks, stage=stage, names=names, **{"pp": 2, **more})


@pytest.mark.slow
@pytest.mark.parametrize("v_shape", [only_full(False), True])
def test_bf16_within_its_rounding(exactness, v_shape):
    exactness(2, 3e-2, stage=1, pp=2, names=["packs", "pipeline 3"], dtype="bf16", v_shape=v_shape)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_weights_that_add_up_to_0_train_by_their_divisor(exactness, stage):
    exactness(2, stage=stage, pp=2, names=["packs", "pipeline 3", "recomputed 16"], drawings=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "v_shape"), [(0, False), only_full(1, False), only_full(0, True), (1, True)], ids=str
)
def test_clipped_steps_are_those_of_plain_torch(on_ranks, stage, v_shape):
    for said in on_ranks(2, "pipeline_jobs.beside_plain_torch", stage=stage, v_shape=v_shape):
        assert said["clipped"]  # by the norm over both stages
        assert max(said["loss"]) <= ROUNDING
        assert max(said["norm"]) <= ROUNDING
        assert said["apart"] <= 1e-4


@pytest.mark.slow
def test_stock_clipping_forgets_the_gradients_of_later_stages(on_ranks):
    for said in on_ranks(2, "pipeline_jobs.beside_plain_torch", stage=0, unmarked=True):
        assert said["apart"] > 5e-3


@pytest.mark.slow
def test_every_pass_of_a_stage_is_marked_and_recorded(on_ranks):
    for said in on_ranks(2, "trained", stage=1, pp=2, name="pipeline 3", steps=1):
        assert said["spans"] == [*said["passes"], ("G", -1), ("U", -1)]
        kinds = Counter(kind for kind, _ in said["passes"])
        words = Counter(mark.split(" of ")[0] for mark in said["marks"])
        assert words["forward"] >= kinds["F"]  # some only take their input
        assert words["weight gradients"] == kinds["W"] > 0
        assert words["backward"] >= kinds["B"]
        assert said["marks"][-1] == "update"


@pytest.mark.slow
def test_recomputed_layers_keep_their_inputs_alone(on_ranks):
    for kept in on_ranks(2, "pipeline_jobs.memory"):
        whole, half, none = (kept[layers] for layers in range(3))
        assert whole - half == pytest.approx(half - none, rel=0.8)
        assert none < 0.4 * whole


@pytest.mark.slow
def test_what_was_sent_is_not_kept(on_ranks):
    assert on_ranks(2, "pipeline_jobs.alive_after_sending") == [0, 0]


FAULTS = {
    "pipeline 3": ["dropped accumulator", "restarted positions", "weights of nothing", "loss per micro-batch"],
    "slices, all replayed": ["shifted tape"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(unnoticed, name):
    assert unnoticed(2, FAULTS[name], stage=1, pp=2, names=[name]) == []


@pytest.mark.slow
def test_a_backward_that_takes_the_loss_of_another_micro_batch_is_caught(on_ranks):
    for errors in on_ranks(2, "pipeline_jobs.crossed_losses"):
        assert errors["sound"] <= ROUNDING
        assert errors["crossed"] > 1e-3


@pytest.mark.slow
def test_foreign_plans_and_unequal_replays_are_refused(on_ranks):
    for said in on_ranks(2, "pipeline_jobs.refused"):
        assert "a plan for 2 ranks, 1 in the job" in said["ranks"]
        assert "a plan for 1 stages, 2 in the job" in said["stages"]
        assert "no complete DeepSpeed checkpoint" in said["load"]
        assert "act_fn drops 0.1" in said["dropout"]


def test_a_stage_output_that_was_sent_holds_no_memory():
    weight = torch.ones(4, requires_grad=True)
    output = weight * 2
    StageTrainer.free_output(None, output)
    assert output.untyped_storage().nbytes() == output.element_size()
    output.backward(gradient=torch.arange(4.0))
    assert weight.grad.tolist() == [0, 2, 4, 6]
