"""What users write: the evenload section of a ds_config, and the ds_config keys of a recipe."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.machine.layout import Layout
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting
from evenload.core.recipe import recipe as recipes
from evenload.integrations.deepspeed.engine.ds_config import OWNED, ds_config
from evenload.integrations.deepspeed.engine.traits import traits_of
from evenload.integrations.host.step import refuse_foreign
from evenload.integrations.huggingface.models import shape_of
from evenload.integrations.unmodified.exact_number import into_exactly
from evenload.integrations.unmodified.section import parse_section, recipe_of


def test_the_section_is_the_plugins_schema_plus_a_recipe():
    section = parse_section({"packing": {"enabled": True, "max_tokens": 4096}})
    recipe = recipe_of(section, None)
    assert [plugin.name for plugin in recipe.enabled()] == ["packing"]
    assert recipe.plugins.packing.max_tokens == 4096


def test_the_section_wins_over_its_file_and_the_file_over_the_session(tmp_path):
    (tmp_path / "r.yaml").write_text("plugins: {packing: {enabled: true, max_tokens: 100}}\ntrain: {seed: 3}\n")
    base = recipes.parse({"plugins": {"packing": {"max_tokens": 7}}, "train": {"seed": 9}})
    from_file = recipe_of(parse_section({"recipe": str(tmp_path / "r.yaml")}), base)
    assert (from_file.plugins.packing.max_tokens, from_file.train.seed) == (100, 3)
    changed = recipe_of(parse_section({"recipe": str(tmp_path / "r.yaml"), "packing": {"max_tokens": 50}}), base)
    assert (changed.plugins.packing.enabled, changed.plugins.packing.max_tokens) == (True, 50)
    assert recipe_of(parse_section({"packing": {"enabled": True}}), base).plugins.packing.max_tokens == 7
    assert recipe_of(None, base) is base
    assert recipe_of(None, None) is None


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"pakcing": {}}, "evenload has no key 'pakcing'.*did you mean 'packing'"),
        ({"packing": {"max_token": 5}}, "evenload.packing has no key 'max_token'.*did you mean 'max_tokens'"),
        ({"packing": {"max_tokens": "auto"}}, "evenload.packing.max_tokens is not valid.*auto"),
        ({"packing": {"max_tokens": 0}}, "max_tokens is not valid"),
        (True, "is not an object"),
    ],
)
def test_a_wrong_section_names_the_key_and_the_nearest(section, told):
    with pytest.raises(EvenloadError) as caught:
        parse_section(section)
    assert re.search(f"(?s){told}", str(caught.value)), str(caught.value)


def test_costs_are_counted_from_the_live_model():
    config = SimpleNamespace(
        num_hidden_layers=3, hidden_size=60, num_attention_heads=7, intermediate_size=99, vocab_size=11, model_type="x"
    )
    shape = shape_of(config)
    assert (shape.num_layers, shape.ffn_hidden_size, shape.vocab_size) == (3, 99, 11)
    assert (shape.heads, shape.query_size) == (7, 56)
    chain = PlanChain.of_model(recipes.parse({}), shape, Layout(dp=8), traits_of(3, "bf16"))
    traffic = chain.context.traffic
    assert (traffic.sharding, traffic.layers, traffic.state_bytes_per_token) == ("parameters", 3, 60 * 2)
    assert chain.limits.num_ranks == 8


def test_clipping_is_always_written_and_gradients_are_summed_where_deepspeed_can():
    recipe = recipes.parse({"trainer": "deepspeed", "train": {"clip_grad": 0.0}})
    assert ds_config(recipe, 2)["gradient_clipping"] == 0.0
    assert ds_config(recipe.changed({"train.clip_grad": 0.7}), 2)["gradient_clipping"] == 0.7
    for stage in range(4):
        written = ds_config(recipe.changed({"deepspeed.zero_stage": stage}), 2)
        assert written.get("gradient_allreduce_op") == ("sum" if stage < 3 else None)


def test_further_keys_are_merged_and_owned_ones_refused():
    def of(config):
        return ds_config(recipes.parse({"trainer": "deepspeed", "deepspeed": {"config": config}}), 2)

    merged = of({"zero_optimization": {"reduce_bucket_size": 77}, "wall_clock_breakdown": True})
    assert merged["zero_optimization"] == {"reduce_bucket_size": 77, "stage": 1}
    assert merged["wall_clock_breakdown"] is True
    for key, do in OWNED.items():
        with pytest.raises(EvenloadError) as caught:
            of({key: 1})
        assert f"'{key}'" in str(caught.value)
        assert do in str(caught.value)
    for zero in ({"stage": 2}, {"offload_optimizer": {"device": "cpu"}}, {"compute_grad_norm": False}, "three"):
        with pytest.raises(EvenloadError, match="zero_optimization"):
            of({"zero_optimization": zero})


@pytest.mark.parametrize("timed", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
def test_timers_that_fail_in_pipelines_are_refused_there(timed):
    recipe = recipes.parse({"trainer": "deepspeed", "deepspeed": {"config": timed}})
    ds_config(recipe, 2)
    with pytest.raises(EvenloadError, match="fails in pipelines"):
        ds_config(recipe.changed({"parallel.pp": 2}), 1)
    off = {"wall_clock_breakdown": False, "flops_profiler": {"enabled": False}}
    ds_config(recipe.changed({"parallel.pp": 2, "deepspeed.config": off}), 1)


def test_one_stage_runs_no_weight_gradients_of_their_own():
    order = ((Op("F", 0), Op("B", 0), Op("W", 0)),)
    plan = StepPlan(as_lengths([4]), (MicroBatch((Slice(0, 0, 4),), (0,)),), Limits(1, 4), order)
    with pytest.raises(EvenloadError, match="weight gradients as passes of their own"):
        refuse_foreign(plan, 1, 1, splits_backward=False)


@pytest.mark.parametrize("section", [{}, {"packing": {"enabled": True, "max_tokens": 64}}])
def test_a_script_of_ones_own_shares_nothing_and_is_told_so_once(caplog, section):
    recipe = recipe_of(parse_section({**section, "mesh": {"enabled": True, "max_tokens": 64}}), None)
    recipe = recipe.changed({"trainer": "deepspeed", "parallel": {"dp": 4}})
    with caplog.at_level("WARNING", logger="evenload"):
        chain = PlanChain.of_model(recipe, (at := Setting.of_recipe(recipe)).shape, recipe.layout(), at.traits)
        PlanChain.of_model(recipe, (at := Setting.of_recipe(recipe)).shape, recipe.layout(), at.traits, warn=False)
    assert caplog.text.count("plugins.mesh.enabled=True has no effect") == 1
    plan = chain.plan(as_lengths([64, 60, 3, 2, 9]))
    assert sum(len(m.slices) for rank in into_exactly(plan, 2, chain.context.costs) for m in rank) == 5
