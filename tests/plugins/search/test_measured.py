"""Settings that are trained here mend a wrong profile: what their steps say of costs ranks all settings again."""

import numpy as np
import pytest
import yaml
from evenload import api
from evenload.core.costs import refit
from evenload.core.costs.by_setting import with_degrees
from evenload.core.costs.refit import coefficients, with_coefficients
from evenload.core.errors import EvenloadError
from evenload.core.machine import cluster as clusters
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import judge
from evenload.core.planning.setting import Setting, costs_of
from evenload.core.recipe.recipe import RECIPES, parse
from evenload.core.simulate.predict import predict
from evenload.plugins.search.measured import STEPS, Correction, trained
from evenload.plugins.search.search import Enough, search
from evenload.training.launching import launch
from harness.cases import only_full

RANKS = 8
PINS = ("parallel.pp=1", "megatron.overlap_grad_reduce=false")


def recipe_of(hidden=512, **sections):
    model = {"num_layers": 4, "hidden_size": hidden, "num_attention_heads": 8, "vocab_size": 512}
    base = {"model": model, "cluster": "a100", "train": {"global_batch_size": 24}, "data": {"max_length": 8192}}
    return parse({**base, **sections})


LENGTHS = as_lengths(np.clip(np.random.default_rng(5).lognormal(6.5, 1.2, 96), 16, 8192).astype(int))


def machine(recipe, num_ranks, steps):
    """What a run would say on the machine that costs=auto describes, whatever the recipe's costs say."""
    planned = PlanChain.of_recipe(recipe, recipe.layout(num_ranks))
    true = PlanChain.of_recipe(recipe.changed({"costs": "auto"}), recipe.layout(num_ranks)).context
    prior, window = planned.context.costs, refit.Window(planned.context.costs)
    rows = []
    for step in range(steps):
        plan = planned.plan(LENGTHS[24 * (step % 4) : 24 * (step % 4) + 24])
        taken, said = judge(plan, true).step_s, judge(plan, planned.context).step_s
        rows.append({"step_s": taken + 0.5, "plan_wait_s": 0.5, "predicted_s": said})
        if step:
            work = refit.rows_of(plan, prior.recompute)
            seconds = work @ refit.coefficients(true.costs)[:6]
            compute = predict(plan, prior, head_frac=planned.context.head_frac)
            busiest = float(seconds.sum(axis=1).max()), max(compute.busy_s)
            rest_s = refit.rest_of_step(taken, said, compute.step_s, busiest, prior.update_s, 1)
            window.add(work, seconds[:, 0], seconds[:, 1], rest_s)
    return {
        "steps": rows,
        "refit": {"prior": refit.coefficients(prior).tolist(), "newest": window.coefficients().tolist()},
    }


def wrong_profile(folder, hidden, name, times):
    """A file of costs of which one coefficient is so many times too large."""
    costs = costs_of(Setting.of_recipe(recipe_of(hidden)), clusters.load("a100", RECIPES / "clusters"))
    passes = {
        direction: one.model_copy(update={name: getattr(one, name) * times})
        for direction, one in (("forward", costs.forward), ("backward", costs.backward))
    }
    path = folder / "wrong.yaml"
    path.write_text(yaml.safe_dump(costs.model_copy(update=passes).model_dump(exclude_none=True)))
    return str(path)


def best_of(recipe, pins=PINS, **more):
    return search(recipe, LENGTHS, [RANKS], pins, enough=Enough(0.0), **more)


def true_s(hidden, row):
    """The step of a setting where costs are what they are."""
    pins = tuple(f"{key}={str(value).lower()}" for key, value in row["settings"].items())
    return float(best_of(recipe_of(hidden), pins)["rows"][0]["step_s"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "name", "times", "loss"), [(512, "launch_s", 0.0, 1.5), only_full(1024, "token_s", 50.0, 1.05)]
)
def test_a_wrong_profile_is_mended_by_a_few_steps(tmp_path, hidden, name, times, loss):
    wrong = recipe_of(hidden, costs=wrong_profile(tmp_path, hidden, name, times))
    least_s = best_of(recipe_of(hidden))["rows"][0]["step_s"]
    assert true_s(hidden, best_of(wrong)["rows"][0]) > loss * least_s, "the profile misleads"
    out = tmp_path / "best.yaml"
    mended = best_of(wrong, measure=2, train=machine, out=out)
    assert true_s(hidden, mended["rows"][0]) <= 1.03 * least_s
    taken = [row["measured_s"] for row in mended["measured"]]
    assert taken == sorted(taken)
    for row in mended["measured"]:
        before, after = (abs(row[key] / row["measured_s"] - 1) for key in ("predicted_s", "refitted_s"))
        assert after < 0.6 * before
    written = api.load_recipe(out)
    assert written.costs == str(tmp_path / "best.costs.yaml")
    again = best_of(written, tuple(f"{k}={str(v).lower()}" for k, v in mended["rows"][0]["settings"].items()))
    assert again["rows"][0]["step_s"] == pytest.approx(mended["rows"][0]["step_s"], rel=1e-9)


def test_what_steps_say_holds_for_all_that_was_measured():
    base = costs_of(Setting.of_recipe(recipe_of()), clusters.load("a100", RECIPES / "clusters"))
    costs = with_degrees({1: base, 2: with_coefficients(base, 2.0 * coefficients(base))})
    right = Correction(np.arange(1.0, 8.0), np.zeros(7)).of_costs(costs)
    assert coefficients(right.by_tp[2]) == pytest.approx(2.0 * coefficients(base) * np.arange(1.0, 8.0))
    assert coefficients(right) == pytest.approx(coefficients(base) * np.arange(1.0, 8.0))


def test_where_nothing_can_be_fitted_the_steps_ratio_holds_for_all_coefficients():
    slow = best_of(recipe_of(), measure=1, train=lambda *asked: {**slower(*asked), "refit": None})
    (row,) = slow["measured"]
    assert row["measured_s"] == pytest.approx(3 * row["predicted_s"])
    assert row["predicted_s"] < row["refitted_s"] <= row["measured_s"] * (1 + 1e-9)


def slower(recipe, num_ranks, steps):
    """A machine on which all takes three times as long."""
    said = machine(recipe, num_ranks, steps)
    return {**said, "steps": [{**row, "step_s": 0.5 + 3 * row["predicted_s"]} for row in said["steps"]]}


@pytest.mark.slow
def test_a_setting_is_trained_on_ranks_of_this_machine_and_nothing_is_kept(tmp_path, launched_by_forge, monkeypatch):
    monkeypatch.setattr(launch, "launch", launched_by_forge)
    changes = {
        "data": {"source": "python-docstrings/email", "max_length": 256, "long_samples": "truncate"},
        "plugins.packing.max_tokens": 512,
        "train.steps": None,
        "train.epochs": 1,
        "checkpoint.dir": str(tmp_path / "kept"),
        "log.jsonl": str(tmp_path / "log.jsonl"),
    }
    result = trained(api.load_recipe("quickstart").changed(changes), 2, STEPS)
    assert len(result["steps"]) == STEPS
    assert all(row["step_s"] > 0 and row["predicted_s"] > 0 for row in result["steps"])
    assert result["refit"]["newest"] != result["refit"]["prior"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "ranks", "says"),
    [
        (recipe_of(trainer="transformers"), [2], "own loop"),
        (recipe_of(), [2, 4], "this machine"),
        (recipe_of(plugins={"lora": {"enabled": True}}), [2], "one model"),
    ],
)
def test_what_cannot_be_trained_here_is_refused_before_the_search(recipe, ranks, says):
    with pytest.raises(EvenloadError, match=says):
        search(recipe, LENGTHS, ranks, measure=1)
