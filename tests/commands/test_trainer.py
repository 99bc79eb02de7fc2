"""A trainer that one row adds: doctor, plan, train and a proof, and scripts under ``evenload run``."""

import json

import pytest
from evenload.api import load_recipe
from evenload.commands.doctor import doctor
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import json_schema, parse
from evenload.core.recipe.traits import TRAINERS
from evenload.training.hosts import require_own_loop
from harness.commands import command

ROW = """
from dataclasses import replace
from evenload.core.recipe.traits import OWN, TRAINERS, Loop

TRAINERS["toy"] = replace(
    TRAINERS["deepspeed"],
    loops=(Loop("evenload train, Toy", OWN),),
    gradient_errors={"fp32": 3e-6},
)
"""
"""DeepSpeed's host under another name."""
RECIPE = """
trainer: toy
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}
data: {source: python-stdlib, max_length: 64}
parallel: {dp: 1}
train: {steps: 2, global_batch_size: 8}
plugins: {packing: {enabled: true, max_tokens: 256}}
"""


@pytest.fixture
def toy():
    exec(ROW, {})
    yield
    del TRAINERS["toy"]


def test_a_row_is_all_that_recipes_and_doctor_need(toy, tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    result = doctor(load_recipe(tmp_path / "r.yaml"))
    (row,) = [row for row in result["loops"] if row["trainer"] == "toy"]
    assert (row["name"], row["refused"], result["trainers"]["toy"]) == ("evenload train, Toy", None, True)
    assert "evenload train, Toy" in [row["path"] for row in result["attention_paths"]]
    assert json_schema()["properties"]["trainer"]["enum"][-1] == "toy"
    with pytest.raises(EvenloadError, match="does not drive trainer transformers") as refusal:
        require_own_loop("transformers")
    assert refusal.value.do.endswith("trainer: megatron or deepspeed or toy")


def test_without_its_row_it_is_no_trainer():
    with pytest.raises(EvenloadError, match="trainer is not valid"):
        parse({"trainer": "toy"})


@pytest.mark.slow
def test_a_toy_trainer_plans_and_trains(tmp_path, toy, forge):
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "lengths.txt").write_text("64\n17\n30\n5\n" * 4)
    assert command(tmp_path, "plan", "r.yaml", "--lengths", "lengths.txt").returncode == 0

    def run(verb, *words):
        done = forge("deepspeed").run(tmp_path, (verb, "r.yaml", *words, "--json"), 1, ROW)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert len(run("train")["steps"]) == 2
    assert run("verify", "--steps", "1")["exact"]
