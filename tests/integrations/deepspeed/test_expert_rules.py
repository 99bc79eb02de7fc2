"""What Transformers' blocks and AutoEP cannot do with experts is refused by name; configs say what experts cost."""

from __future__ import annotations

import json

import pytest
from evenload.core.errors import EvenloadError
from evenload.core.machine.shape import ExpertShape
from evenload.core.recipe import recipe as recipes
from evenload.core.recipe.sections import Model
from evenload.core.recipe.sizes import shape_of

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 97}


UNKNOWN = {"score": "sigmoid", "capacity_factor": 1.0, "shared_ffn_hidden_size": 8, "dispatcher": "allgather"}
UNKNOWN |= dict.fromkeys(("z_loss", "sequence_aux_loss", "batch_aux_loss"), 0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({f"model.moe.{key}": value}, f"know no model.moe.{key}") for key, value in UNKNOWN.items()),
        ({"model.moe.every": 2}, "every layer of Transformers' mixtral has experts"),
        ({"parallel.pp": 2}, "run dense models alone"),
        ({"parallel.ep": 2, "deepspeed.zero_stage": 0, "train.dtype": "bf16"}, "does not know divided experts"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_starts(changes, said):
    recipe = recipes.parse({"trainer": "deepspeed", "model": {"family": "mixtral", "moe": {"num_experts": 4}}})
    with pytest.raises(EvenloadError, match=said):
        recipe.changed(changes)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, ExpertShape(8, 2, 64, 0, (0, 1, 2, 3))),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [3]},
            ExpertShape(8, 2, 16, 0, (0, 1, 2)),
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
            | {"shared_expert_intermediate_size": 24},
            ExpertShape(8, 2, 16, 24, (1, 3)),
        ),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2}
            | {"first_k_dense_replace": 1},
            ExpertShape(8, 2, 16, 32, (1, 2, 3)),
        ),
    ],
)
def test_a_config_says_which_experts_it_has(tmp_path, fields, wanted):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES | fields))
    assert shape_of(Model(config=path)).experts == wanted


def test_ep_divides_the_experts_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral", **SIZES, "num_local_experts": 6}))
    with pytest.raises(EvenloadError, match=r"does not divide the experts of model\.config"):
        recipes.parse({"trainer": "deepspeed", "model": {"config": str(path)}, "parallel": {"ep": 4}})
