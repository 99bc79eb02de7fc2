"""Plans of tenants: whose samples they draw, what company is said to save, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from evenload.commands.tables.plan import table as table_of_plan
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import as_lengths
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.adapter import Adapter
from evenload.core.recipe.recipe import parse
from evenload.core.recipe.sizes import shape_of
from evenload.plugins.lora.costs import TenantLoad, with_tenants
from evenload.plugins.lora.shared_plan import members_of
from evenload.plugins.report.page import page_of
from evenload.training.forecast.forecast import look_ahead
from evenload.training.forecast.samples import lengths_of
from evenload.training.forecast.sweep import sweep

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}


def recipe_of(folder, **changes):
    plugins = {
        "lora": {"enabled": True, "tenants": folder and str(folder)},
        "packing": {"enabled": True, "max_tokens": 600},
    }
    return parse({"model": SIZES, "parallel": {"dp": 2}, "cluster": "h100", "plugins": plugins}).changed(changes)


def tenant(folder, name, lengths, text=""):
    """A tenant whose samples have these lengths."""
    rows = [{"input_ids": [1] * length} for length in lengths]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / f"{name}.yaml").write_text(f"data: {{source: {folder / name}.jsonl}}\n{text}")


@pytest.fixture
def folder(tmp_path):
    tenant(tmp_path, "long", [500, 400, 300, 200], "train: {batch_size: 2, steps: 2}\nadapter: {r: 4}")
    tenant(tmp_path, "short", [50, 40, 30, 20, 10, 9], "train: {batch_size: 3, steps: 3, seed: 7}\nadapter: {r: 16}")
    return tmp_path


def test_steps_are_the_union_of_the_tenants_own_batches(folder):
    forecast = look_ahead(recipe_of(folder), {}, 9)
    assert len(forecast.steps) == 3, "as many as the longest tenant has"
    batches = [(step.ours.plan.lengths.tolist(), step.ours.plan.tenants.tolist()) for step in forecast.steps]
    assert [tenants for _, tenants in batches] == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1]]
    assert sorted(n for lengths, _ in batches[:2] for n in lengths[:2]) == [200, 300, 400, 500]
    assert sorted(n for lengths, _ in batches[:2] for n in lengths[2:]) == [9, 10, 20, 30, 40, 50]
    for step in forecast.steps:
        assert all(one.plan.tenants.tolist() == step.ours.plan.tenants.tolist() for one in step.baselines.values())


def test_what_company_saves_is_the_sum_of_each_alone_over_all_together(folder):
    recipe = recipe_of(folder)
    found = look_ahead(recipe, {}, 2).to_json()["tenants"]
    bare, shape = PlanChain.of_recipe(recipe, recipe.layout()), shape_of(recipe.model)
    alone_s = 0.0
    steps = look_ahead(recipe, {}, 2).steps
    for number, rank in ((0, 4), (1, 16)):
        chain = with_tenants(bare, shape, [TenantLoad(Adapter(r=rank), 1)])
        own_s = [
            outcome_of(chain.plan(as_lengths(plan.lengths[plan.tenants == number])), chain.context).step_s
            for plan in (step.ours.plan for step in steps)
        ]
        assert found["tenants"][number]["alone_s"] == pytest.approx(np.mean(own_s))
        alone_s += sum(own_s)
    assert found["one_after_another_s"] == pytest.approx(alone_s)
    assert found["together_s"] == pytest.approx(sum(step.ours.outcome.step_s for step in steps))
    assert found["saving"] == pytest.approx(alone_s / found["together_s"])
    assert 1.0 < found["saving"] <= found["saving_at_most"] * (1 + 1e-9)
    assert found["bound_s"] <= found["together_s"] * (1 + 1e-9)
    assert found["predicted"] is True


def test_a_row_a_tenant(folder):
    rows = look_ahead(recipe_of(folder), {}, 3).to_json()["tenants"]["tenants"]
    assert [(row["name"], row["steps"], row["samples"]) for row in rows] == [("long", 2, 2), ("short", 3, 3)]
    assert rows[0]["tokens"] == 1400 / 2
    assert rows[0]["share"] > 0.9
    assert rows[1]["share"] == pytest.approx((2 * (1 - rows[0]["share"]) + 1) / 3)
    assert rows[1]["adapter_weights"] == 4 * rows[0]["adapter_weights"]


def test_lengths_alone_are_enough(folder, tmp_path):
    """Lengths by name beside the files of the folder, and without any folder."""
    whole = look_ahead(recipe_of(folder), {}, 2).to_json()["tenants"]
    (tmp_path / "long.txt").write_text("500\n400\n300\n200")
    (tmp_path / "ten.txt").write_text("12\n" * 10)
    (tmp_path / "short.txt").write_text("50\n40\n30\n20\n10\n9")
    for path in folder.glob("*.jsonl"):
        path.unlink()
    words = [f"{name}={tmp_path / name}.txt" for name in ("long", "short")]
    recipe = recipe_of(folder)
    files = lengths_of(recipe, words)
    assert isinstance(files, dict)
    assert look_ahead(recipe, files, 2).to_json()["tenants"] == whole
    (stranger,) = members_of(recipe_of(None), {"stranger": tmp_path / "ten.txt"})
    assert (stranger.name, stranger.config.adapter, stranger.config.train.batch_size) == ("stranger", Adapter(), 8)


def test_a_tenant_of_domains_is_planned_as_it_draws(folder, tmp_path):
    for name, lengths in (("a", [90] * 8), ("b", [7] * 30)):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"input_ids": [1] * n}) for n in lengths))
    domains = {"a": {"source": str(folder / "a.jsonl")}, "b": {"source": str(folder / "b.jsonl"), "share": 3}}
    document = {"data": {"domains": domains}, "train": {"batch_size": 4, "epochs": 1}}
    (folder / "mixed.yaml").write_text(json.dumps(document))
    member = next(one for one in members_of(recipe_of(folder), {}) if one.name == "mixed")
    assert member.steps == 10, "30 samples at three of four a step"
    forecast = look_ahead(recipe_of(folder), {}, 12)
    assert len(forecast.steps) == 10
    for step in forecast.steps:
        plan = step.ours.plan
        assert sorted(plan.lengths[plan.tenants == 1].tolist()) == [7, 7, 7, 90]
    (tmp_path / "mixed.txt").write_text("9\n" * 9)
    with pytest.raises(EvenloadError, match="the tenant mixed has domains, and a file of lengths says none"):
        members_of(recipe_of(folder), {"mixed": tmp_path / "mixed.txt"})
    weights = {
        "evaluate": {"source": str(folder / "a.jsonl")},
        "sweep": {"data.domains": [domains, {**domains, "c": 3}]},
    }
    (folder / "mixed.yaml").write_text(json.dumps({**document, **weights}))
    with pytest.raises(EvenloadError, match=r"a value of sweep.data.domains.c is not valid"):
        members_of(recipe_of(folder), {})
    weights["sweep"] = {"data.domains": [domains, {"a": {**domains["a"], "share": 0}}]}
    (folder / "mixed.yaml").write_text(json.dumps({**document, **weights}))
    with pytest.raises(EvenloadError, match="nothing would be drawn"):
        members_of(recipe_of(folder), {})


def test_trials_of_a_sweep_are_tenants(folder):
    tenant(folder, "tried", [100] * 8, "train: {batch_size: 2}\nsweep: {adapter.r: [4, 8], train.lr: [1.0e-4, 2.0e-4]}")
    members = members_of(recipe_of(folder), {})
    assert [member.name for member in members][2:] == [f"tried.r={r}.lr={lr}" for r in (4, 8) for lr in (1e-4, 2e-4)]
    assert [member.config.adapter.r for member in members][2:] == [4, 4, 8, 8]


REFUSED = {
    "no folder": ("", {}, "nobody says which tenants"),
    "an empty folder": ("empty", {}, "no tenant to plan"),
    "a folder that is not there": ("nowhere", {}, "folder of tenants is not there"),
    "data that are not there": ("absent", {}, "the tenant absent: "),
    "too few samples": ("few", {}, "the tenant few has fewer samples than one batch"),
    "a bad file": ("bad", {}, "the tenant bad: data is not valid"),
    "samples over every cap": ("large", {"plugins.packing.slices": "off"}, "longer than plugins.packing.max_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused(name, tmp_path):
    place, changes, message = REFUSED[name]
    folder = tmp_path / place
    if place not in ("", "nowhere"):
        folder.mkdir()
    if place == "absent":
        (folder / "absent.yaml").write_text("data: {source: nothing.jsonl}")
    if place == "few":
        tenant(folder, "few", [10, 20])
    if place == "bad":
        (folder / "bad.yaml").write_text("dato: {source: x}")
    if place == "large":
        tenant(folder, "large", [700] * 8)
    with pytest.raises(EvenloadError, match=message) as caught:
        look_ahead(recipe_of(folder if place else None, **changes), {}, 1)
    assert caught.value.do


def test_words_of_lengths(folder):
    recipe, bare = recipe_of(folder), parse({})
    assert lengths_of(recipe, []) == {}
    assert lengths_of(recipe, ["a=x.txt", "b=y=z.txt"]) == {"a": Path("x.txt"), "b": Path("y=z.txt")}
    assert lengths_of(bare, ["x.txt"]) == Path("x.txt")
    with pytest.raises(EvenloadError, match="by their own tokenizers"):
        lengths_of(recipe, [], "bytes")
    for of, words, message in (
        (recipe, ["x.txt"], "by name"),
        (recipe, ["a=x", "a=y"], "given twice"),
        (bare, ["x", "y"], "planned from one file"),
    ):
        with pytest.raises(EvenloadError, match=message):
            lengths_of(of, words)


def test_a_tenant_with_a_sample_of_too_many_slices_is_named(folder, tmp_path):
    (folder / "large.yaml").write_text("data: {source: x, max_length: 10000000}\ntrain: {batch_size: 1}")
    (tmp_path / "large.txt").write_text("9999999")
    with pytest.raises(EvenloadError, match="the tenant large: a sequence would be cut into more than"):
        look_ahead(recipe_of(folder, **{"plugins.packing.max_tokens": 64}), {"large": tmp_path / "large.txt"}, 1)


def test_tables_and_page_have_a_row_a_tenant(folder, shown):
    forecast = look_ahead(recipe_of(folder), {}, 2, record=True)
    text, page = shown(table_of_plan(forecast.to_json()), 200), page_of(forecast)
    saving = f"{forecast.to_json()['tenants']['saving']:.2f}x"
    for where in (text, page):
        assert all(word in where for word in ("long", "short", saving))


def test_a_sweep_of_settings_plans_tenants(folder):
    result = sweep(recipe_of(folder), ["parallel.dp=1,2"], {}, 1, None, {})
    assert [row["settings"] for row in result["rows"]] == [{"parallel.dp": 1}, {"parallel.dp": 2}]
    assert not any("error" in row for row in result["rows"])
