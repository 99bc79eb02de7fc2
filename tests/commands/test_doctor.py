"""What `evenload doctor` says of attention and of loops is what they do; documents have the same table."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evenload.api import load_recipe
from evenload.commands.doctor import doctor, document, plugins_in_table
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.setting import Setting
from evenload.core.recipe.traits import NOTHING, REFUSED, all_loops
from evenload.runtime.attention.blocks import BLOCKS, choose_block
from evenload.runtime.attention.kernels import KERNELS, choose_kernel, explain

ROOT = Path(__file__).parents[2]
LOOPS = all_loops()
ON_SCRIPTS = [loop for loop in LOOPS if loop.start == "evenload run"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 20, 512])
def test_the_kernels_that_are_named_are_those_that_run(dtype, head_dim):
    inputs = (torch.device("cpu"), dtype, head_dim)
    for (name, why), chosen, rows in (
        (explain(KERNELS, *inputs), choose_kernel(*inputs), KERNELS),
        (explain(BLOCKS, *inputs), choose_block(*inputs), BLOCKS),
    ):
        assert name == chosen.name
        before = [row.name for row in rows][: [row.name for row in rows].index(name)]
        assert all(one in why for one in before)
        assert "on cpu" in why


def test_a_kernel_that_is_missing_and_one_that_does_not_fit_have_reasons_of_their_own():
    rows = [
        replace(KERNELS[0], name="a", available=lambda: False, supports=lambda *_: True),
        replace(KERNELS[0], name="b", supports=lambda *_: False),
        replace(KERNELS[0], name="c", available=lambda: False, supports=lambda *_: True),
        replace(KERNELS[-1], name="d"),
    ]
    name, why = explain(rows, torch.device("cpu"), torch.float32, 8)
    inputs = "float32 on cpu, head dimension 8"
    assert (name, why) == ("d", f"a, c: not installed; b: made for other inputs than {inputs}")


@pytest.mark.every_plugin
def test_every_loop_has_a_row_and_every_plugin_a_cell():
    result = doctor()
    assert [row["name"] for row in result["loops"]] == [loop.name for loop in LOOPS]
    names = ["data", "packing", "mesh", "pipeline", "moe", "lora"]
    assert all([cell["name"] for cell in row["plugins"]] == names for row in result["loops"])
    assert all(row["refused"] is None for row in result["loops"]), "everything is installed here"
    # Megatron's own loops have two layer specs.
    paths = [row["path"] for row in result["attention_paths"]]
    assert len(paths) == len(LOOPS) + 1
    assert all(sum(path.startswith(loop.name) for path in paths) >= 1 for loop in LOOPS)


@pytest.mark.every_plugin
def test_a_recipe_says_what_is_on_and_which_loops_refuse_it():
    result = doctor(load_recipe(ROOT / "recipes" / "moe.yaml"))
    rows = {row["name"]: row for row in result["loops"]}
    of = {cell["name"]: cell["enabled"] for cell in rows["evenload train, Megatron-Core"]["plugins"]}
    assert of == {"data": False, "packing": True, "mesh": False, "pipeline": False, "moe": False, "lora": False}
    assert "model.moe.score" in rows["evenload train, DeepSpeed"]["refused"]
    assert rows["evenload train, Megatron-Core"]["refused"] is None


@pytest.mark.parametrize("loop", ON_SCRIPTS, ids=lambda loop: loop.name)
def test_what_is_refused_in_scripts_is_refused(loop, tmp_path):
    does = {plugin.name: loop.does(plugin) for plugin in plugins_in_table()}
    asked = {name for name in does if does[name] == REFUSED}
    (tmp_path / "tenant.yaml").write_text("data: {source: x.jsonl}\n")
    more = {
        "lora": {"plugins.lora.enabled": True, "plugins.lora.tenants": str(tmp_path)},
        "data": {"plugins.data": {"enabled": True, "mix": {"policy": "odm"}}, "data.domains": {"a": {"source": "x"}}},
        "moe": {"plugins.moe.enabled": True, "model.moe": {"num_experts": 4}, "model.family": "mixtral"},
    }
    for name, changes in more.items():
        layout = {"parallel.dp": 2, **({} if name != "moe" or loop.trainer == "transformers" else {"parallel.ep": 2})}

        def chain(changes=changes, layout=layout):
            recipe = load_recipe(ROOT / "recipes" / "hf-trainer.yaml").changed({"trainer": loop.trainer})
            recipe = recipe.changed({**layout, **changes})
            return PlanChain.of_model(
                recipe, (at := Setting.of_recipe(recipe)).shape, recipe.layout(), at.traits, warn=False
            )

        if name in asked:
            with pytest.raises(EvenloadError):
                chain()
        else:
            assert name in [plugin.name for plugin, _ in chain().links] or does[name] != NOTHING


@pytest.mark.every_plugin
def test_documents_have_the_table_of_loops():
    assert document() in (ROOT / "docs" / "support.md").read_text()
