"""Plans on DeepSpeed's pipelines: what their instructions are, and that gradients are those of plain training."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.machine.layout import Layout
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed.engine.model import build_model
from evenload.integrations.deepspeed.pipeline.model import _borders, _take_apart
from evenload.runtime.stage.executor import StageTrainer

ROUNDING = 2e-6


def test_stages_have_equally_many_layers_or_as_many_as_are_said():
    assert _borders(4 + 3, Layout(pp=2)) == [0, 3, 7]
    assert _borders(12 + 3, Layout(pp=4)) == [0, 4, 7, 10, 15]
    assert _borders(12 + 3, Layout(pp=4, layers=(1, 5, 4, 2))) == [0, 2, 7, 11, 15]


def _recipe(**more):
    data = {"trainer": "deepspeed", "model": {"vocab_size": 97}, "parallel": {"pp": 2}}
    for key, value in more.items():
        section, _, name = key.partition("__")
        data.setdefault(section, {})[name] = value
    return recipes.parse(data)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"deepspeed__zero_stage": 2}, "zero_stage 2, parallel.pp 2"),
        ({"deepspeed__zero_stage": 3}, "zero_stage 3, parallel.pp 2"),
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
        _take_apart(recipe, recipe.layout(2), 0)
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
    whole, found = build_model(recipe), {}
    generator = torch.get_rng_state()
    for stage in range(2):
        parts = _take_apart(recipe, recipe.layout(2), stage)
        own = [p for layer in parts.layers for p in layer.parameters() if not p.is_meta]
        found |= {parts.names[id(p)]: p for p in own}
        assert len(own) < len(parts.names)
        rotary = dict(whole.base_model.rotary_emb.named_buffers())
        assert all(torch.equal(buffer, rotary[name]) for name, buffer in parts.rotary.named_buffers())
    wanted = dict(whole.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(torch.get_rng_state(), generator)


def _assert_exact(results, names, rounding=ROUNDING, loss=ROUNDING, norm=ROUNDING):
    for name in names:
        for result in results:
            assert result[name]["grad"] <= rounding, name
            assert result[name]["loss"] <= loss, name
            assert result[name]["norm"] <= norm, name
            assert result[name]["executed"], name
        assert sorted({n for r in results for n in r[name]["names"]}) == results[0]["all"]
    for result in results:
        assert result["moved"] == 0.0
        assert result["parameters"][0] == result["parameters"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "names", "more"),
    [
        (0, ["whole", "0", "3", "4", "5 W", "6 W"], {}),
        (1, ["whole", "7", "1 W", "2 W"], {}),
        (1, ["whole", "3 W"], {"family": "qwen2", "recompute": True}),
        (0, ["2 W"], {"family": "gpt"}),
        (1, ["whole", "3", "1 W", "7 recompute"], {"layers": [1, 3]}),
    ],
)
def test_two_stages_give_the_gradients_of_plain_training(on_ranks, stage, names, more):
    _assert_exact(on_ranks(2, "rank_pipeline.exactness", pp=2, stage=stage, names=names, **more), names)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_one_stage_recomputes_by_the_plan(on_ranks, stage):
    names = ["7 recompute", "14 recompute"]
    _assert_exact(on_ranks(2, "rank_pipeline.exactness", pp=1, stage=stage, names=names), names)


@pytest.mark.slow
def test_bf16_within_its_rounding(on_ranks):
    for names, v_shape in ((["whole", "2 W"], False), (["2 drawn"], True)):
        results = on_ranks(2, "rank_pipeline.exactness", pp=2, stage=1, names=names, dtype="bf16", v_shape=v_shape)
        _assert_exact(results, names, rounding=3e-2, loss=1e-3, norm=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "stage", "names"),
    [
        (2, 0, ["whole", "0", "5 W", "6 idle", "5 shared"]),
        (2, 1, ["whole", "2", "1 W", "8 idle", "1 shared"]),
        (4, 1, ["3", "5 W"]),
    ],
)
def test_four_ranks_with_different_numbers_of_micro_batches(on_ranks, pp, stage, names):
    _assert_exact(on_ranks(4, "rank_pipeline.exactness", pp=pp, stage=stage, names=names), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "pp", "stage", "names", "more"),
    [
        (2, 2, 0, ["7", "1 drawn", "2 drawn"], {"recompute": True}),
        (4, 2, 1, ["3", "1 drawn", "2 drawn"], {"family": "qwen2"}),
        (4, 4, 1, ["1 drawn"], {"num_layers": 8}),
    ],
)
def test_two_stages_on_each_device_give_the_gradients_of_plain_training(on_ranks, ranks, pp, stage, names, more):
    call = "rank_pipeline.exactness"
    _assert_exact(on_ranks(ranks, call, pp=pp, stage=stage, names=names, v_shape=True, **more), names)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_clipped_steps_of_a_v_are_those_of_plain_torch(on_ranks, stage):
    for told in on_ranks(2, "rank_pipeline.trained", pp=2, stage=stage, names=["1 drawn", "2"], v_shape=True):
        assert told["clipped"]
        assert max(told["loss"]) <= ROUNDING
        assert max(told["norm"]) <= ROUNDING
        assert told["apart"] <= 1e-4


@pytest.mark.slow
def test_a_v_resumes_on_other_ranks_and_is_not_taken_for_a_pipeline_without(on_ranks, tmp_path):
    arguments = {"pp": 2, "stage": 1, "dtype": "bf16", "folder": str(tmp_path), "v_shape": True}
    went_on = on_ranks(4, "rank_pipeline.save_and_go_on", **arguments)
    assert went_on == on_ranks(4, "rank_pipeline.resume", **arguments)
    for told in on_ranks(4, "rank_pipeline.resume", **{**arguments, "v_shape": False}):
        assert "another number of pipeline stages on each device" in told[0]
    for resumed in on_ranks(2, "rank_pipeline.resume", **arguments):
        for wanted, found in zip(went_on[0], resumed, strict=True):
            assert float.fromhex(found) == pytest.approx(float.fromhex(wanted), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_clipped_steps_are_those_of_plain_torch(on_ranks, stage):
    for told in on_ranks(2, "rank_pipeline.trained", pp=2, stage=stage, names=["1 W", "2"]):
        assert told["clipped"]  # by the norm over both stages
        assert max(told["loss"]) <= ROUNDING
        assert max(told["norm"]) <= ROUNDING
        assert told["apart"] <= 1e-4
        for (passes, spans), marks in zip(told["passes"], told["marks"], strict=True):
            assert spans == [*passes, ("G", -1), ("U", -1)]
            words = Counter(mark.split(" of ")[0] for mark in marks)
            assert words["forward"] >= sum(kind == "F" for kind, _ in passes)  # some only take their input
            assert words["weight gradients"] == sum(kind == "W" for kind, _ in passes)
            assert words["backward"] >= sum(kind == "B" for kind, _ in passes)
            assert marks[-1] == "update"


@pytest.mark.slow
def test_stock_clipping_forgets_the_gradients_of_later_stages(on_ranks):
    for told in on_ranks(2, "rank_pipeline.trained", pp=2, stage=0, names=["1 W", "2"], unmarked=True):
        assert told["apart"] > 5e-3


@pytest.mark.slow
def test_recomputed_layers_keep_their_inputs_alone(on_ranks):
    for kept in on_ranks(2, "rank_pipeline.memory", pp=2):
        whole, half, none = (kept[layers] for layers in range(3))
        assert whole - half == pytest.approx(half - none, rel=0.8)
        assert none < 0.4 * whole


@pytest.mark.slow
def test_what_was_sent_is_not_kept(on_ranks):
    assert on_ranks(2, "rank_pipeline.alive_after_sending", pp=2) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16")])
def test_resume_is_bit_equal(on_ranks, tmp_path, stage, dtype):
    arguments = {"pp": 2, "stage": stage, "dtype": dtype, "folder": str(tmp_path)}
    went_on = on_ranks(2, "rank_pipeline.save_and_go_on", **arguments)
    assert went_on == on_ranks(2, "rank_pipeline.resume", **arguments)
    assert len(set(went_on[0])) == 2
    assert len(set(map(tuple, went_on))) == 1


@pytest.mark.slow
def test_other_ranks_go_on_and_other_stages_are_refused(on_ranks, tmp_path):
    arguments = {"pp": 2, "stage": 1, "dtype": "fp32", "folder": str(tmp_path)}
    went_on = on_ranks(4, "rank_pipeline.save_and_go_on", **arguments)
    assert went_on == on_ranks(4, "rank_pipeline.resume", **arguments)
    for told in on_ranks(4, "rank_pipeline.resume", **{**arguments, "pp": 4}):
        assert "written under another pp" in told[0]
    for told in on_ranks(4, "rank_pipeline.resume", **{**arguments, "layers": [1, 3]}):
        assert "another number of layers of each stage" in told[0]
    for resumed in on_ranks(2, "rank_pipeline.resume", **arguments):
        for wanted, found in zip(went_on[0], resumed, strict=True):
            assert float.fromhex(found) == pytest.approx(float.fromhex(wanted), rel=1e-6)


@pytest.mark.slow
def test_mutants_are_caught(on_ranks):
    for found in on_ranks(2, "rank_pipeline.mutants", pp=2):
        sound = {name: errors for name, errors in found.items() if name.startswith("sound")}
        assert len(sound) == 4
        assert all(max(errors) <= ROUNDING for errors in sound.values()), sound
        broken = {name: errors for name, errors in found.items() if name not in sound}
        assert len(broken) == 6
        assert all(max(errors) > 1e-3 for errors in broken.values()), broken


@pytest.mark.slow
def test_foreign_plans_and_unequal_replays_are_refused(on_ranks):
    for told in on_ranks(2, "rank_pipeline.refused", pp=2):
        assert "a plan for 2 ranks, 1 in the job" in told["ranks"]
        assert "a plan for 1 stages, 2 in the job" in told["stages"]
        assert "no complete DeepSpeed checkpoint" in told["load"]
        assert "act_fn drops 0.1" in told["dropout"]


def test_a_stage_output_that_was_sent_holds_no_memory():
    weight = torch.ones(4, requires_grad=True)
    output = weight * 2
    StageTrainer.free_output(None, output)
    assert output.untyped_storage().nbytes() == output.element_size()
    output.backward(gradient=torch.arange(4.0))
    assert weight.grad.tolist() == [0, 2, 4, 6]
