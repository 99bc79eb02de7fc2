"""Recorded loads under every planner of layers: ratios by hand, what planners that look back know, what is refused."""

import json
import re
from dataclasses import replace

import evenload
import numpy as np
import pytest
from evenload.commands.tables.plan import table as table_of_plan
from evenload.core.errors import EvenloadError
from evenload.core.experts.history import updated
from evenload.core.experts.quotas import at_home
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.core.recipe.recipe import parse
from evenload.core.registry import LayerPlugin, PluginConfig
from evenload.training import pictures
from evenload.training.forecast.forecast import look_ahead
from harness.lazy import LazyModule

figure, image = LazyModule("matplotlib.figure"), LazyModule("matplotlib.image")

LENGTHS = np.arange(20, 84)
HEADER = {"format": 1, "experts": 4, "topk": 2, "layers": [0, 1], "ranks": 2, "ep": 2}
EVEN, HOT = [[5000] * 4] * 2, [[12000, 0, 4000, 0], [12000, 0, 0, 4000]]


def recipe(ep=2, **sections):
    model = {"family": "mixtral", "num_layers": 2, "hidden_size": 64, "moe": {"num_experts": 4, "topk": 2}}
    parallel = {"dp": max(2, ep), "ep": ep}
    plugins = {"moe": {"mode": "clone", "tolerance": 1.0}, **sections.pop("plugins", {})}
    train = {"global_batch_size": 8}
    return parse({"model": model, "parallel": parallel, "train": train, "plugins": plugins, **sections})


def written(folder, *steps, **header):
    lines = [HEADER | header, *({"step": step, "counts": counts} for step, counts in enumerate(steps))]
    path = folder / "loads.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replayed(asked, path):
    section = look_ahead(asked, LENGTHS, 1, loads=path).to_json()["loads"]
    assert section["predicted"]
    return section


def test_busiest_over_mean_is_that_of_the_tokens_that_ranks_compute(tmp_path):
    section = replayed(recipe(planner={"background": False}), written(tmp_path, [[EVEN, EVEN]], [[EVEN, HOT]] * 3))
    assert section["steps"] == {"first": 1, "last": 1, "count": 1}  # before the first one nothing is known
    assert section["passes"] == 3
    home, ours = section["planners"]["static"], section["planners"]["moe"]
    assert home["imbalance_of_layers"] == [1.0, 24 / 16]
    assert (home["imbalance_p50"], home["imbalance_max"]) == (1.25, 1.5)
    assert (home["copies"], home["copied_bytes"], home["slots"]) == (0.0, 0.0, 0)
    assert ours["imbalance_of_layers"] == [1.0, 1.0]
    assert ours["copies"] == 0.5  # of expert 0, in the second layer
    assert ours["copied_bytes"] == 0.5 * 3 * 64 * 192 * 4
    assert ours["slots"] == 1
    assert home["exposed_ms"] == 0
    # Of both layers: counts, four journeys of the most tokens that a rank sends or takes, and the busiest rank's three
    # products of 64 x 192, three times over, on the cluster 'local'.
    counting_s = 5e-5 + 4 * 8 / 2e9
    journeys_s = [4 * (5e-5 + tokens * 64 * 4 / 2e9) for tokens in (10000, 12000)]
    experts_s = [3 * tokens * 2 * 3 * 64 * 192 / 5e10 for tokens in (20000, 24000)]
    assert home["layer_ms"] == pytest.approx(1e3 * (counting_s + sum(journeys_s + experts_s) / 2))
    assert 0 < ours["exposed_ms"] < ours["layer_ms"] < home["layer_ms"]


def test_groups_of_another_size_hold_the_same_tokens(tmp_path):
    path = written(tmp_path, *[[[EVEN, EVEN], [HOT, EVEN]]] * 4)
    home = replayed(recipe(4), path)["planners"]["static"]
    assert home["imbalance_of_layers"] == pytest.approx([34 / 18, 1.0])


class Backward:
    """A planner of layers that notes which loads it knows, and copies what was hottest in the first layer."""

    def __init__(self):
        self.known = []
        self.plugin = LayerPlugin(
            name="backward",
            summary="",
            papers=(),
            stage=90,
            config=PluginConfig,
            plan=self,
            layers={"spread": self.spread},
            needs_loads=lambda *_: True,
        )

    __module__ = __name__

    def __call__(self, plan, context, config):
        self.known.append(context.experts.loads)
        hottest = int(np.argmax(context.experts.loads[0])) if context.experts.loads else 0
        copies = ((hottest,), ()) if hottest >= 2 else ((), (hottest,))
        return plan.revised(experts=ExpertPolicy("spread", 1, copies=(copies, ())))

    def spread(self, counts, policy, copies):
        quotas = at_home(counts, policy, copies)
        for rank, experts in enumerate(copies):
            for expert in experts:
                quotas[expert, rank] = quotas[expert].sum() // 2
                quotas[expert, 1 - rank] -= quotas[expert, rank]
        return quotas


@pytest.fixture
def backward():
    planner = Backward()
    evenload.register(planner.plugin)
    yield planner
    evenload.unregister("backward")


@pytest.mark.parametrize(("background", "late_steps"), [(True, 2), (False, 1)])
def test_planners_that_look_back_know_what_they_would_in_training(tmp_path, backward, background, late_steps):
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 50, (6, 1, 2, 2, 4))
    section = replayed(recipe(planner={"background": background}), written(tmp_path, *steps.tolist()))
    histories = []
    for counts in steps:
        histories.append(updated(histories[-1] if histories else (), counts.sum(axis=(0, 2)).astype(float)))
    assert backward.known == histories[: 6 - late_steps]
    assert section["steps"]["first"] == late_steps
    row = section["planners"]["backward"]
    assert row["late_steps"] == late_steps
    assert row["copies"] == 0.5  # one in the first layer, whether its tokens came or not
    for name in ("moe", "static"):
        assert section["planners"][name]["late_steps"] == 0
    wanted = []
    for known, counts in zip(histories, steps[late_steps:], strict=False):
        loads = counts[0, 0].sum(axis=0)
        hottest = int(np.argmax(known[0]))
        away = loads[hottest] // 2
        ranks = np.array([loads[:2].sum(), loads[2:].sum()]) + (away if hottest >= 2 else -away) * np.array([1, -1])
        wanted.append(ranks.max() / ranks.mean())
    assert row["imbalance_of_layers"][0] == pytest.approx(np.mean(wanted))


def test_a_planner_that_breaks_a_law_is_left_out_and_said(tmp_path, backward):
    def lose(counts, policy, copies):
        return np.maximum(at_home(counts, policy, copies) - 1, 0)

    backward.plugin.layers["spread"] = lose
    section = replayed(recipe(), written(tmp_path, *[[[EVEN, EVEN]]] * 4))
    assert "backward" not in section["planners"]
    assert any(note.startswith("backward is left out: quotas lose tokens") for note in section["notes"])
    with pytest.raises(EvenloadError, match="quotas lose tokens"):
        replayed(recipe(plugins={"backward": {"enabled": True}}), tmp_path / "loads.jsonl")


@pytest.mark.parametrize(
    ("asked", "header", "what", "detail"),
    [
        ({}, {"topk": 1}, "is of another model", "topk 1, the recipe's 2"),
        ({"model": {"num_layers": 2}, "parallel": {"dp": 2}}, {}, "for models with experts", "dense"),
        ({"parallel": {"dp": 2}}, {}, "that share experts", "parallel.ep 1"),
    ],
)
def test_loads_that_do_not_fit_are_refused_before_anything_is_planned(tmp_path, asked, header, what, detail):
    model = {"family": "mixtral", "num_layers": 2, "hidden_size": 64, "moe": {"num_experts": 4, "topk": 2}}
    one = parse({"model": model, "parallel": {"dp": 2, "ep": 2}, **asked})
    with pytest.raises(EvenloadError, match=what) as caught:  # the lengths are never looked at
        look_ahead(one, tmp_path / "nothing.txt", 1, loads=written(tmp_path, [[EVEN, EVEN]], **header))
    assert re.search(detail, caught.value.found)
    assert caught.value.do


def test_experts_and_layers_of_another_model_are_named(tmp_path):
    path = written(tmp_path, [[[[1] * 8] * 2]], experts=8, layers=[1])
    with pytest.raises(EvenloadError, match="is of another model") as caught:
        replayed(recipe(), path)
    assert caught.value.found == "experts 8, the recipe's 4; layers [1], the recipe's [0, 1]"


def test_many_passes_are_thinned_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr("evenload.training.experts.replay._MOST_LAYERS", 6)
    section = replayed(recipe(), written(tmp_path, *[[[EVEN, EVEN]]] * 9))
    assert section["passes"] == 3
    assert section["steps"] == {"first": 2, "last": 8, "count": 3}


def test_the_table_has_a_row_a_planner_and_says_what_is_predicted(tmp_path, shown):
    result = look_ahead(recipe(), LENGTHS, 1, loads=written(tmp_path, *[[[EVEN, HOT]]] * 4)).to_json()
    text = shown(table_of_plan(result), 200)
    assert "experts, ep 2, loads of" in text
    assert "predicted, but for planning, from 2 passes of steps 2 to 3, 2 layers each" in text
    assert re.search(r"static +1.2500 +1.5000 +1.5000 +0.00 +0 MiB", text)
    assert "plugins.moe is not enabled" in text
    assert "loads" not in look_ahead(recipe(), LENGTHS, 1).to_json()


def test_the_picture_draws_every_layer_by_planner_below_the_steps(tmp_path):
    from evenload.plugins.report.plot import draw_loads

    forecast = look_ahead(recipe(), LENGTHS, 1, loads=written(tmp_path, *[[[EVEN, HOT]]] * 4))
    assert forecast.loads is not None
    axes, key_axes = figure.Figure().subplots(2)
    draw_loads(axes, key_axes, forecast.loads)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn["static: experts at home"] == [1.0, 1.5]
    assert drawn["moe"] == [1.0, 1.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1"]
    assert "predicted" in axes.get_title(loc="left") + axes.get_title()
    pictures.draw(forecast, plot=tmp_path / "with.png")
    pictures.draw(replace(forecast, loads=None), plot=tmp_path / "without.png")
    heights = [image.imread(tmp_path / f"{name}.png").shape[0] for name in ("with", "without")]
    assert heights[0] > heights[1]
