"""What tenants do not go with is refused by name."""

import pytest
from evenload.api import load_plugins
from evenload.commands.run import run
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting
from evenload.core.recipe.recipe import parse
from evenload.plugins.lora.tenant_file import parse_tenant

load_plugins()
LORA = {"plugins": {"lora": {"enabled": True}}}
MOE = {"num_experts": 4, "topk": 2}
REFUSED = {
    "experts": ({"model": {"family": "mixtral", "moe": MOE}}, "experts have no adapters"),
    "experts of qwen": ({"model": {"family": "qwen3_moe", "moe": MOE}}, "experts have no adapters"),
    "static cp": ({"parallel": {"cp": 2}}, "static context parallelism"),
    "frozen twice": ({"train": {"freeze": ["embed"]}}, "freezes the whole model already"),
    "the trainer of Transformers": ({"trainer": "transformers"}, "trainer transformers trains no adapters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_recipes_that_do_not_go_with_tenants(name):
    settings, message = REFUSED[name]
    assert parse(settings)
    with pytest.raises(EvenloadError, match=message):
        parse({**settings, **LORA})


def test_divided_experts_and_their_planner_are_refused():
    model = {"family": "mixtral", "moe": MOE}
    both = {"lora": {"enabled": True}, "moe": {"enabled": True}}
    with pytest.raises(EvenloadError, match="'lora' and 'moe' cannot be enabled together"):
        parse({"model": model, "plugins": both})
    with pytest.raises(EvenloadError, match=r"parallel\.ep divides experts, and this model has none"):
        parse({"parallel": {"ep": 2}, **LORA})


@pytest.mark.parametrize(
    ("experts", "ep", "message"),
    [
        (', "num_local_experts": 4, "num_experts_per_tok": 2', 1, "experts have no adapters"),
        ("", 2, "does not go with divided experts"),
    ],
)
def test_experts_of_a_config_are_refused(experts, ep, message, tmp_path):
    config = tmp_path / "config.json"
    sizes = '"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96'
    config.write_text(f'{{{sizes}, "vocab_size": 256{experts}}}')
    settings = {"model": {"config": str(config)}, "trainer": "deepspeed", "parallel": {"ep": ep}}
    with pytest.raises(EvenloadError, match=message) as caught:
        parse({**settings, **LORA})
    assert ("config.json" if experts else "parallel.ep 2") in caught.value.found


def test_loops_of_the_user_s_own_are_refused(tmp_path):
    recipe = parse(LORA)
    with pytest.raises(EvenloadError, match="no place in a training loop of your own") as caught:
        PlanChain.of_model(recipe, (at := Setting.of_recipe(recipe)).shape, recipe.layout(), at.traits)
    assert "evenload train" in caught.value.do
    file = tmp_path / "recipe.yaml"
    file.write_text("plugins: {lora: {enabled: true}}")
    with pytest.raises(EvenloadError, match="no place in a training loop of your own"):
        run(file, ["python", "-c", "raise SystemExit(3)"])


def test_samples_of_tenants_are_in_no_groups():
    with pytest.raises(EvenloadError, match=r"data\.group"):
        parse_tenant("data: {source: a.jsonl, group: of}", "acme")


def test_fewer_samples_than_ranks_are_no_fault_where_tenants_draw_them():
    settings = {"parallel": {"dp": 8}, "train": {"global_batch_size": 4}}
    with pytest.raises(EvenloadError, match="smaller than the number"):
        parse(settings)
    assert parse({**settings, **LORA})


@pytest.mark.parametrize(
    ("lora", "says"),
    [({"tenants": "t", "enabled": True}, False), ({"tenants": "t"}, True), ({"enabled": False}, False)],
)
def test_a_folder_of_tenants_without_the_plugin_is_named(lora, says):
    said = parse({"plugins": {"lora": lora}}).idle()
    assert [text[:38] for text in said] == ["plugins.lora.tenants has no effect: pl"] * says
