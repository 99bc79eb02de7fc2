"""What-if sweeps: every combination a row, the best marked, the impossible told."""

import json
from dataclasses import replace

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.commands.tables.plan import table as table_of_plan
from evenload.commands.tables.sweep import table as table_of_sweep
from evenload.core.errors import EvenloadError
from evenload.training.forecast.forecast import look_ahead
from evenload.training.forecast.sweep import MOST, _strongest, axes_of, best_of, sweep
from evenload.training.pictures.planners import names
from harness.commands import command

NO_FILES = {"--out": None, "--trace": None}
RECIPE = """
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 8}
parallel: {dp: 8}
train: {global_batch_size: 64, dtype: bf16}
data: {max_length: 4096}
cluster: a100
plugins: {packing: {enabled: true, max_tokens: 4096}}
"""


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "lengths.txt"
    path.write_text("\n".join(map(str, np.random.default_rng(0).lognormal(5.5, 1.2, 1000).astype(int) + 1)))
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path)


def test_degrees_compare_on_equal_machines(recipe, lengths):
    result = sweep(recipe, ["parallel.cp=1,2,4,8"], lengths, 2, 16, NO_FILES)
    rows = result["rows"]
    assert [row["settings"] for row in rows] == [{"parallel.cp": cp} for cp in (1, 2, 4, 8)]
    degrees = [(row["layout"]["cp"], row["layout"]["dp"], row["world_size"]) for row in rows]
    assert degrees == [(1, 16, 16), (2, 8, 16), (4, 4, 16), (8, 2, 16)]
    assert rows[0]["exposed_frac"] < rows[3]["exposed_frac"]
    assert all(row["strongest_baseline"]["gain"] > 0.98 for row in rows)
    assert [row["trains"] for row in rows] == [True, False, False, False]
    assert max(rows, key=lambda row: row["tokens_per_s_per_rank"])["layout"]["cp"] > 1, "it is no example"
    assert result["best"] == 0, "what `evenload train` refuses is no answer"


def test_a_row_says_what_plan_says(recipe, lengths):
    """The sweep's numbers are those of `plan` with the same override."""
    row = sweep(recipe, ["parallel.dp=4"], lengths, 2, None, NO_FILES)["rows"][0]
    steps = look_ahead(recipe.changed({"parallel.dp": 4}), lengths, 2).to_json()["steps"]
    total_s = sum(step["step_s"] for step in steps)
    assert row["step_s"] == pytest.approx(total_s / 2)
    assert row["tokens_per_s"] == pytest.approx(sum(step["tokens"] for step in steps) / total_s)
    assert row["tokens_per_s_per_rank"] == pytest.approx(row["tokens_per_s"] / 4)
    assert row["imbalance"] == pytest.approx(sum(step["imbalance"] for step in steps) / 2)
    baselines = {n: sum(s["baselines"][n]["step_s"] for s in steps) for n in steps[0]["baselines"]}
    fastest = min(baselines, key=lambda name: baselines[name])
    assert row["strongest_baseline"] == {"name": fastest, "gain": pytest.approx(baselines[fastest] / total_s)}


def test_a_baseline_that_ignores_a_setting_is_no_rival(recipe, lengths, shown):
    """With two ranks to a sequence at most, what shares each among all four is not allowed, however fast it is."""
    mesh = recipe.changed({"parallel.dp": 4, "plugins.packing.enabled": False, "plugins.mesh.enabled": True})
    free, bound = (
        look_ahead(mesh.changed({"plugins.mesh.max_degree": degree}), np.array([4096] * 64), 1) for degree in (0, 2)
    )
    for forecast, ignores in ((free, None), (bound, "plugins.mesh.max_degree is 2, 4 ranks share a sequence")):
        told = forecast.to_json()["steps"][0]["baselines"]
        assert (told["cp_all"]["ignores"], told["cp_all"]["over_caps"]) == (ignores, ignores)
        assert told["cp_1"]["ignores"] is None
        assert ("cp_all" in names(forecast)) == (ignores is None)
        text = " ".join(shown(table_of_plan(forecast.to_json())).split())
        assert ("cp_all: not allowed" in text) == (ignores is not None)
        assert (f"cp_all is not allowed: {ignores}" in text) == (ignores is not None)
    others = {name: one.outcome.step_s for name, one in bound.steps[0].baselines.items() if name != "cp_all"}
    faster = replace(bound.steps[0].baselines["cp_all"].outcome, step_s=0.5 * min(others.values()))
    one = replace(bound.steps[0].baselines["cp_all"], outcome=faster)
    step = replace(bound.steps[0], baselines={**bound.steps[0].baselines, "cp_all": one})
    assert _strongest((step,), 1.0)["gain"] == min(others.values())


def test_an_impossible_combination_says_why_and_the_others_go_on(recipe, lengths, shown):
    """Words multiply, and any key can be swept."""
    result = sweep(recipe, ["parallel.tp=1,3", "cluster=a100,nowhere"], lengths, 1, 24, NO_FILES)
    errors = {(r["settings"]["parallel.tp"], r["settings"]["cluster"]): r.get("error") for r in result["rows"]}
    assert errors[1, "a100"] is None
    assert errors[3, "a100"]["what"] == "parallel.tp does not divide the attention heads"
    assert errors[1, "nowhere"]["what"] == "there is no such cluster"
    assert result["best"] == 0
    text = shown(table_of_sweep(result), 200)
    assert "impossible" in text
    assert "parallel.tp=3 cluster=a100: parallel.tp does not divide the attention heads (tp 3" in text
    assert "predicted" in text


def test_if_nothing_can_be_planned_that_is_an_error(recipe, lengths):
    with pytest.raises(EvenloadError, match="none of the 2 combinations") as caught:
        sweep(recipe, ["parallel.tp=3,5"], lengths, 1, 15, NO_FILES)
    assert "parallel.tp=3: parallel.tp does not divide" in caught.value.found


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("parallel.cp", "not of the form"),
        ("parallel.cp=", "not of the form"),
        ("=1,2", "not of the form"),
        ("parallel.cp=1,{", "not YAML"),
        ("parallel.cpp=1,2", "parallel has no key 'cpp'"),
        ("nonsense=1", "the recipe has no key 'nonsense'"),
        ("plugins.pakcing.max_tokens=1,2", "plugins has no key 'pakcing'"),
        ("parallel.cp.more=1,2", "parallel.cp has no keys below it"),
        ("parallel.cp=1,2,1", "given twice"),
        (f"train.global_batch_size={','.join(map(str, range(1, MOST + 2)))}", f"at most {MOST}"),
    ],
)
def test_bad_words_are_refused(recipe, word, what):
    with pytest.raises(EvenloadError, match=what):
        axes_of(recipe, [word])


def test_values_are_yaml(recipe):
    words = ["parallel.dp=null,2", "train.recompute=true,false", "cluster='a100'", "deepspeed.config.any=[1,2],3"]
    assert axes_of(recipe, words) == {
        "parallel.dp": [None, 2],
        "train.recompute": [True, False],
        "cluster": ["a100"],
        "deepspeed.config.any": [[1, 2], 3],
    }
    with pytest.raises(EvenloadError, match="swept twice"):
        axes_of(recipe, ["parallel.dp=1", "parallel.dp=2"])


def test_the_best_fits_is_fastest_and_then_holds_least():
    def row(rate, held, fits=True, trains=True):
        return {"tokens_per_s_per_rank": rate, "peak_bytes": held, "fits": fits, "trains": trains}

    assert best_of([row(9, 9, fits=False), {"error": {}}, row(5, 3), row(5, 2), row(4, 1)]) == 3
    assert best_of([row(9, 9, fits=False), {"error": {}}]) is None
    assert best_of([row(9, 1, trains=False), row(5, 1)]) == 1
    assert best_of([row(9, 1, trains=False)]) == 0


def test_what_does_not_fit_is_shown_and_never_best(recipe, lengths, shown):
    """A model of 70 billion weights on one rank."""
    big = recipe.changed({"model": {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}})
    result = sweep(big, ["parallel.tp=1,2"], lengths, 1, 8, NO_FILES)
    assert result["best"] is None
    text = shown(table_of_sweep(result), 200)
    assert "too much" in text
    assert "none fits" in text


def test_through_the_command_line(tmp_path, lengths):
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def run(*more):
        return command(tmp_path, "plan", "recipe.yaml", "--lengths", lengths, "--nproc", "8", *more)

    told = run("--sweep", "parallel.cp=1,2", "--json")
    assert told.returncode == 0
    assert [row["world_size"] for row in json.loads(told.stdout)["rows"]] == [8, 8]
    assert "what if" in run("--sweep", "parallel.cp=1,2").stdout
    for refused in (["--sweep", "parallel.cpp=1"], ["--sweep", "parallel.cp=1,2", "--out", "plan.json"]):
        done = run(*refused)
        assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "plan.json").exists()
