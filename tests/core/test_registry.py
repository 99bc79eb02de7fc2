"""The registry: every verb has its inverse, a clash shows both sides."""

from dataclasses import fields, replace

import evenload
import pytest
from evenload.core import registry
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe import recipe as recipes
from evenload.core.registry import LayerPlugin, PluginConfig, StepPlugin


def leave_alone(plan, context, config):
    return plan


ABOUT = {"name": "other", "summary": "does nothing", "papers": (), "stage": 99, "config": PluginConfig}
OTHER = StepPlugin(**ABOUT, plan=leave_alone, clashes=("packing",))


@pytest.fixture
def other():
    yield evenload.register(OTHER)
    evenload.unregister("other")


def test_registered_plugins_are_part_of_the_schema(other):
    recipe = recipes.parse({"plugins": {"other": {"enabled": True}}})
    assert [p.name for p in recipe.enabled()] == ["other"]
    assert "other" in str(recipes.json_schema()["$defs"]["Plugins"])


def test_planners_of_layers_are_no_planners_of_steps():
    evenload.register(LayerPlugin(**ABOUT, plan=leave_alone))
    try:
        recipe = recipes.parse({"plugins": {"other": {"enabled": True}, "packing": {"enabled": True}}})
        assert [p.name for p in recipe.enabled()] == ["packing", "other"]
        assert [p.name for p, _ in PlanChain.of_recipe(recipe, recipe.layout()).links] == ["packing"]
    finally:
        evenload.unregister("other")


def test_a_plugin_that_answers_no_question_is_refused():
    with pytest.raises(EvenloadError, match="'other' is of no kind") as caught:
        evenload.register(registry.Plugin(**ABOUT))
    assert "StepPlugin" in caught.value.do


def test_no_kind_of_plugin_has_more_than_fourteen_fields():
    """One row with 36 served all kinds: nobody could say which field was whose."""
    kinds = (registry.StepPlugin, registry.LayerPlugin, registry.DataPlugin, registry.SlicePlugin)
    assert max(len(fields(kind)) for kind in kinds) <= 14


def test_unregistered_plugins_are_unknown():
    with pytest.raises(EvenloadError, match="no key 'other'"):
        recipes.parse({"plugins": {"other": {}}})
    with pytest.raises(EvenloadError, match="no such plugin"):
        evenload.unregister("other")


def test_two_plugins_of_one_name_show_both_sides(other):
    assert evenload.register(other) is other
    with pytest.raises(EvenloadError, match="two plugins are called 'other'") as caught:
        evenload.register(replace(other, summary="another"))
    assert caught.value.found.count(__name__) == 2


def test_plugins_that_exclude_each_other(other):
    with pytest.raises(EvenloadError, match="cannot be enabled together"):
        recipes.parse({"plugins": {"other": {"enabled": True}, "packing": {"enabled": True}}})


def test_a_broken_entry_point_is_named_and_stops_nothing(monkeypatch, caplog):
    from importlib.metadata import EntryPoint

    broken = EntryPoint("theirs", "no_such_module_of_theirs", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken] if group == registry.ENTRY_POINT_GROUP else [])
    with caplog.at_level("WARNING"):
        registry.load_entry_points()
    assert "'theirs' cannot be imported (no_such_module_of_theirs: ModuleNotFoundError" in caplog.text


def test_a_plugin_that_raises_is_named():
    def fail(plan, context, config):
        raise KeyError("theirs")

    evenload.register(replace(OTHER, plan=fail, clashes=()))
    try:
        recipe = recipes.parse({"plugins": {"other": {"enabled": True}}})
        with pytest.raises(KeyError) as caught:
            PlanChain.of_recipe(recipe, recipe.layout()).plan(as_lengths([3, 4]))
        assert caught.value.__notes__ == ["raised by the plugin 'other' while it planned"]
    finally:
        evenload.unregister("other")
