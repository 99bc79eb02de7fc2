"""A family of models that one row adds: from doctor to a folder that Transformers opens and training starts from."""

import json

import pytest
from evenload.api import load_recipe
from evenload.commands.doctor import doctor
from evenload.core.recipe.families import FAMILIES
from evenload.core.recipe.recipe import json_schema
from harness.cases import only_full
from safetensors.torch import load_file

ROW = """
from evenload.core.recipe.families import FAMILIES, Family

LLAMA = FAMILIES["llama"]
FAMILIES["toy"] = Family(
    "toy",
    fixed={**LLAMA.fixed, "ffn_gain": (2.0, 1.0)},
    modules={
        **LLAMA.modules,
        "ffn_in": "model.layers.#.mlp.left model.layers.#.mlp.right",
        "ffn_out": "model.layers.#.mlp.down",
    },
)
"""
"""Llama with other names in its feed-forward block, and a gain of it, of which we build 1 alone."""
CLASSES = """
import torch
import transformers
from torch import nn


class ToyConfig(transformers.LlamaConfig):
    model_type = "toy"
    ffn_gain: float = 2.0


class ToyBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gain = config.ffn_gain
        self.left = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.right = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden):
        return self.gain * self.down(nn.functional.silu(self.left(hidden)) * self.right(hidden))


class ToyForCausalLM(transformers.LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = ToyBlock(config)
        self.post_init()


transformers.AutoConfig.register("toy", ToyConfig)
transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)
"""
RECIPE = """
model: {model}
data: {{source: python-stdlib, max_length: 64}}
parallel: {{dp: 1}}
train: {{steps: {steps}, global_batch_size: 8, export: {out}, export_prompts: 4}}
checkpoint: {{dir: kept}}
plugins: {{packing: {{enabled: true, max_tokens: 256}}}}
"""
SIZES = "{family: toy, num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}"


@pytest.fixture
def toy():
    exec(ROW, {})
    yield
    del FAMILIES["toy"]


def test_a_row_is_all_that_recipes_and_doctor_need(toy, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE.format(model=SIZES, steps=1, out="out"))
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.model.family == "toy"
    assert all("toy" not in (row["refused"] or "") for row in doctor(recipe)["loops"])
    assert json_schema()["$defs"]["Model"]["properties"]["family"]["enum"][-1] == "toy"


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron", only_full("deepspeed")])
def test_a_toy_family_trains_leaves_and_comes_back(toy, trainer, tmp_path, forge):
    """What leaves is what Transformers' class computes, and is read again as the same model."""

    def run(*words):
        done = forge(trainer).run(tmp_path, (*words, "--json"), 1, ROW + CLASSES)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    for file, model, out in (("r", SIZES, "out"), ("again", "{weights: out}", "again")):
        text = RECIPE.format(model=model, steps=1, out=out)
        (tmp_path / f"{file}.yaml").write_text(f"trainer: {trainer}{text}")
    trained = run("train", "r.yaml")
    agreement = trained["export"]["agreement"]
    assert (agreement["equal"], agreement["largest_difference"] < 1e-4) == (4, True)
    exported = run("export", "kept", "--out", "exported")
    assert exported["tensors"] == trained["export"]["tensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["ffn_gain"]) == ("toy", 1.0)
    (tmp_path / "kept").rename(tmp_path / "kept before")
    again = run("train", "again.yaml")
    assert again["export"]["agreement"]["equal"] == 4
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert before.keys() == after.keys()
    assert all((after[name] - tensor).norm() < 0.3 * tensor.norm() for name, tensor in before.items())
