"""Plugins that a recipe leaves off: what each would gain is what its plan comes to, and its line switches it on."""

import pytest
import yaml
from evenload.api import load_recipe
from evenload.core.plan.step_plan import as_lengths
from evenload.training.forecast import unused
from evenload.training.forecast.forecast import look_ahead
from harness.without import needs

RAGGED = as_lengths([16000 if number % 40 == 0 else 50 + 7 * number % 800 for number in range(400)])
SETTINGS = ("parallel.dp=16", "train.global_batch_size=64", "plugins.packing.max_tokens=16384")


def forecast_of(*settings, name="gpu-node", steps=2):
    return unused.with_unused(look_ahead(load_recipe(name, [*SETTINGS, *settings]), RAGGED, steps))


@needs("mesh")
def test_a_plugin_that_gains_is_found_with_the_gain_of_the_recipe_that_has_its_line():
    forecast = forecast_of()
    (mesh,) = forecast.gaining
    sections = yaml.safe_load(mesh.line)
    assert mesh.plugins == ("mesh",)
    assert sections == {"mesh": {"enabled": True, "max_tokens": 16384}}
    words = [f"plugins.mesh.{key}={value}" for key, value in sections["mesh"].items()]
    with_it = forecast_of(*words)
    ours_s, theirs_s = (sum(step.ours.outcome.step_s for step in one.steps) for one in (forecast, with_it))
    assert mesh.gain == pytest.approx(ours_s / theirs_s)
    assert mesh.gain > 1.2
    assert not with_it.unused


@needs("mesh")
def test_the_page_of_a_plan_has_what_is_unused():
    from evenload.plugins.report.page import page_of

    assert "Beware: these costs are of 28 layers" in page_of(look_ahead(recipe_with("verl-7b"), RAGGED, 1))
    assert "with plugins.mesh, off in this recipe" in page_of(forecast_of())
    assert "off in this recipe" not in page_of(forecast_of("plugins.mesh={enabled: true, max_tokens: 16384}"))


@needs("mesh", "pipeline")
def test_what_does_nothing_in_the_layout_or_the_trainer_is_not_tried():
    names = {name for one in forecast_of("plugins.packing.enabled=false").unused for name in one.plugins}
    assert names == {"packing", "mesh"}, "there is one stage, and nothing for a pipeline to order"
    staged = forecast_of("parallel.pp=2", "parallel.dp=4", steps=1)
    assert ("pipeline",) in [one.plugins for one in staged.unused]
    assert all("mesh" not in one.plugins for one in forecast_of("parallel.cp=2", "parallel.dp=8", steps=1).unused)
    loop = load_recipe("hf-trainer", ["parallel.dp=16", "plugins.packing.max_tokens=16384"])
    assert [one.plugins for one in unused.with_unused(look_ahead(loop, RAGGED, 1)).unused] == [("mesh",)]


@needs("mesh")
def test_what_takes_long_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(unused, "BUDGET_S", 0.0)
    (mesh,) = forecast_of(steps=1).unused
    assert (mesh.plugins, mesh.gain) == (("mesh",), 0.0)


def recipe_with(costs):
    return load_recipe("gpu-node", [*SETTINGS, f"costs={costs}"])


def test_costs_of_another_model_and_costs_without_states_are_said_to_be():
    counted, of_7b = (look_ahead(recipe_with(costs), RAGGED, 1) for costs in ("auto", "verl-7b"))
    assert not counted.costs_differ
    assert counted.fixed_bytes > 0
    assert of_7b.costs_differ.startswith("these costs are of 28 layers and the model has 16")
    assert of_7b.fixed_bytes == 0
