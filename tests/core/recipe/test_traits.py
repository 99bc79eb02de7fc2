"""What planners know of a trainer comes from its integration; core knows no trainer by name."""

from pathlib import Path
from unittest.mock import patch

import evenload.core
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.machine.layout import Layout
from evenload.core.planning.setting import Setting, context_of, limits_of
from evenload.core.recipe import recipe as recipes
from evenload.core.recipe import traits

DEEPSPEED = {"trainer": "deepspeed"}
CORE = Path(evenload.core.__file__).parent


def recipe(**settings):
    return recipes.parse({"model": {"num_layers": 4, "vocab_size": 256}, **settings})


def test_core_names_no_trainer_but_where_a_recipe_has_its_section():
    sections = {CORE / "recipe" / "sections.py", CORE / "recipe" / "recipe.py"}
    naming = [
        path
        for path in CORE.rglob("*.py")
        if path not in sections and any(name in path.read_text().lower() for name in ("megatron", "deepspeed"))
    ]
    assert not naming


def test_a_trainer_that_nobody_described_is_refused():
    with patch.dict(traits.TRAINERS):
        del traits.TRAINERS["deepspeed"]
        with pytest.raises(EvenloadError, match="Input should be 'megatron' or 'transformers'"):
            recipe(trainer="deepspeed")
        traits.TRAINERS.clear()
        with pytest.raises(EvenloadError, match="trainer 'megatron' is like\n  found: known: no trainer"):
            recipe()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("optimizer", 4, False, False, True, True)),
        ({"train.dtype": "bf16", "megatron.overlap_grad_reduce": True}, ("optimizer", 4, False, True, True, True)),
        ({"train.dtype": "fp64", "megatron.distributed_optimizer": False}, ("none", 8, False, False, True, True)),
        ({**DEEPSPEED, "deepspeed.zero_stage": 0}, ("none", 4, False, False, False, False)),
        ({**DEEPSPEED, "deepspeed.zero_stage": 1}, ("optimizer", 4, False, False, False, False)),
        ({**DEEPSPEED, "deepspeed.zero_stage": 3, "train.dtype": "bf16"}, ("parameters", 2, True, *[False] * 3)),
    ],
)
def test_the_row_of_a_trainer_reaches_the_planners(changes, expected):
    asked = recipe().changed(changes)
    setting = Setting.of_recipe(asked)
    context = context_of(setting, Layout(dp=2))
    limits, traffic = limits_of(setting, context), context.traffic
    summed = traffic.gradient_bytes / traffic.weight_bytes * {"bf16": 2, "fp32": 4, "fp64": 8}[asked.train.dtype]
    found = (traffic.sharding, summed, limits.all_in_step, traffic.overlap_gradients, traffic.waits_for_sends)
    assert (*found, limits.splits_backward) == expected
    assert setting.traits.sharding == traffic.sharding


def test_weight_gradients_of_their_own_need_a_pipeline_under_deepspeed():
    asked = recipe(trainer="deepspeed", deepspeed={"zero_stage": 1}, parallel={"pp": 2})
    assert limits_of(Setting.of_recipe(asked), context_of(Setting.of_recipe(asked), Layout(pp=2))).splits_backward
