"""What a search is told beside lengths: tenants, experts' loads, memory, weights, others' plugins; what it writes."""

import json

import evenload
import numpy as np
import pytest
from evenload import api
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.core.registry import Estimates, PluginConfig, StepPlugin
from evenload.plugins.search.search import Enough, search
from evenload.training.forecast.forecast import look_ahead

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
LENGTHS = as_lengths(np.arange(20, 400, 9))
FEW = ("max_tokens=1024", "parallel.tp=1", "parallel.pp=1", "train.recompute=false")


def recipe_of(**sections):
    return parse({"model": MODEL, "cluster": "a100", "train": {"global_batch_size": 8}, **sections})


def proven(recipe, lengths=LENGTHS, pins=FEW, **more):
    return search(recipe, lengths, [2], pins, enough=Enough(0.0), **more)


def test_tenants_are_searched_by_their_own_batches_and_the_recipe_plans_as_the_search_says(tmp_path):
    rng, files = np.random.default_rng(3), {}
    for name, longest in (("long", 900), ("short", 60)):
        files[name] = tmp_path / f"{name}.txt"
        files[name].write_text("\n".join(map(str, rng.integers(5, longest, 64))))
    recipe, out = recipe_of(plugins={"lora": {"enabled": True}}), tmp_path / "best.yaml"
    best = proven(recipe, files, steps=2, out=out)
    forecast = look_ahead(api.load_recipe(out), files, 2, 2)
    assert len(np.unique(forecast.steps[0].ours.plan.tenants)) == 2
    assert best["rows"][0]["step_s"] == pytest.approx(np.mean([one.ours.outcome.step_s for one in forecast.steps]))
    replicas = best["replicas"]
    shapes = parse(
        {**recipe.model_dump(mode="json", exclude_unset=True), "parallel": {"replicas": replicas["replicas"]}}
    )
    assert sum(shapes.ranks_of_replicas) == 2
    assert replicas["faster"] == (1.005 * replicas["step_s"] < best["rows"][0]["step_s"])
    assert replicas["floor_s"] <= replicas["step_s"]
    with pytest.raises(EvenloadError, match="given by name"):
        proven(recipe)


def test_loads_of_experts_make_sharing_them_as_slow_as_they_are_uneven(tmp_path):
    model = {**MODEL, "hidden_size": 2048, "family": "mixtral", "moe": {"num_experts": 4, "topk": 2}}
    header = {"format": 1, "experts": 4, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}
    steps = {}
    for name, counts in (("even", [[4000] * 4] * 2), ("hot", [[8000, 8000, 0, 0]] * 2)):
        rows = [header, *({"step": step, "counts": [[counts, counts]]} for step in range(4))]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        found = proven(recipe_of(model=model), pins=(*FEW, "parallel.ep=2"), loads=tmp_path / name)
        steps[name] = found["rows"][0]["step_s"]
    steps["unknown"] = proven(recipe_of(model=model), pins=(*FEW, "parallel.ep=2"))["rows"][0]["step_s"]
    assert steps["even"] == steps["unknown"]
    assert steps["hot"] > 1.02 * steps["even"]
    with pytest.raises(EvenloadError, match="for models with experts"):
        proven(recipe_of(), loads=tmp_path / "even")


def test_a_mixture_is_searched_by_the_lengths_of_its_domains(tmp_path):
    files = {"short": tmp_path / "short.txt", "long": tmp_path / "long.txt"}
    for name, length in (("short", 100), ("long", 900)):
        files[name].write_text(f"{length}\n" * 200)
    domains = {"short": {"source": "python-docstrings/json", "share": 3}, "long": {"source": "python-stdlib/json"}}
    assert proven(recipe_of(data={"domains": domains, "max_length": 1024}), files)["rows"]


def test_the_memory_that_is_given_is_the_recipes_that_is_written_and_its_page_is_drawn(tmp_path):
    out, report = tmp_path / "best.yaml", tmp_path / "best.html"
    proven(recipe_of(), memory_gib=0.25, out=out, report=report)
    again = api.load_recipe(out)
    assert again.memory_gib == 0.25
    assert PlanChain.of_recipe(again, again.layout()).context.cluster.memory_bytes == 2**28
    assert "<html" in report.read_text()
    with pytest.raises(EvenloadError, match="no setting fits"):
        proven(recipe_of(), memory_gib=1e-6)


def test_sizes_are_those_of_the_folder_of_weights(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "llama", **sizes, "intermediate_size": 96, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {**MODEL, "ffn_hidden_size": 96}
    of_folder, of_fields = (proven(recipe_of(model=model)) for model in ({"weights": str(tmp_path)}, named))
    assert of_folder["rows"] == of_fields["rows"]


class TheirConfig(PluginConfig):
    """A section of somebody else's."""

    level: int = 0


class Theirs:
    """A plugin that leaves plans alone, and knows that plans of level 1 take a second."""

    def __init__(self):
        self.planned = 0

    __module__ = __name__

    def plan(self, plan, _, config):
        self.planned += config.level
        return plan

    def floor_s(self, *asked):
        return float(asked[-1].level)


@pytest.fixture
def theirs():
    ours = Theirs()
    tries = {"enabled": (False, True), "level": (0, 1)}
    evenload.register(
        StepPlugin(
            name="theirs",
            summary="",
            papers=(),
            stage=90,
            config=TheirConfig,
            plan=ours.plan,
            tries=lambda _: tries,
            estimates=Estimates(ours.floor_s),
        )
    )
    yield ours
    evenload.unregister("theirs")


def test_a_plugin_of_a_third_party_has_its_axes_and_its_floor(theirs):
    found = proven(recipe_of())
    values = {(line["key"], line["value"]): line for line in found["axes"]}
    assert {("plugins.theirs.enabled", on) for on in (False, True)} <= values.keys()
    assert values["plugins.theirs.level", 0]["over_best"] == 1.0
    assert theirs.planned == 0, "its floor excludes what it says is slow"
    without = proven(recipe_of(), pins=(*FEW, "plugins.theirs.enabled=false"))
    assert found["rows"][0]["step_s"] == without["rows"][0]["step_s"]
    slow = proven(recipe_of(), pins=(*FEW, "plugins.theirs.enabled=true", "plugins.theirs.level=1"))
    assert slow["rows"][0]["settings"]["plugins.theirs.level"] == 1
    assert theirs.planned > 0
