"""Prompts with their completions, planned from lengths: what computing each prompt once comes to."""

import json

import numpy as np
import pytest
from evenload.api import load_recipe
from evenload.commands.tables.plan import table as table_of_plan
from evenload.core.errors import EvenloadError
from evenload.training.forecast.forecast import look_ahead
from rich.console import Console

SETTINGS = ("parallel.dp=4", "train.global_batch_size=64", "plugins.packing.max_tokens=8192")
GROUPS = [{"prompt": 512, "completions": [32 + 37 * (8 * k + i) % 480 for i in range(8)]} for k in range(16)]


def forecast_of(folder, lines, *settings, steps=1, **more):
    (folder / "lengths.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return look_ahead(load_recipe("gpu-node", [*SETTINGS, *settings]), folder / "lengths.jsonl", steps, **more)


def test_batches_are_of_whole_groups_and_trees_compute_each_prompt_as_often_as_it_pays(tmp_path):
    forecast = forecast_of(tmp_path, GROUPS, steps=2)
    assert sorted(forecast.lengths.tolist()) == sorted(512 + one for line in GROUPS for one in line["completions"])
    for step in forecast.steps:
        trees, lengths = step.trees, step.ours.plan.lengths
        assert trees.rows_tokens == lengths.sum() == step.ours.plan.num_tokens
        assert trees.distinct_tokens == lengths.sum() - 56 * 512, "of 64 samples 8 have the prompt of their group"
        assert trees.distinct_tokens <= trees.tokens < 0.75 * trees.rows_tokens
        assert (trees.tokens - trees.distinct_tokens) % 512 == 0
        assert trees.limit_s < trees.step_s < step.ours.outcome.step_s
        assert not len(step.ours.plan.groups), "rows may go to any rank"


def test_one_rank_has_whole_trees_and_computes_their_work_and_no_more(tmp_path):
    launch = {"launch_s": 0.0}
    costs = {
        "forward": {"token_s": 1.0, "pair_s": 0.5, **launch},
        "backward": {"token_s": 2.0, "pair_s": 1.0, **launch},
    }
    (tmp_path / "costs.yaml").write_text(json.dumps({"source": "by hand", **costs}))
    lines = [{"prompt": 20, "completions": [10, 30]}, {"prompt": 40, "chosen": 6, "rejected": 8}, 25]
    own = ("parallel.dp=1", "train.global_batch_size=5", f"costs={tmp_path / 'costs.yaml'}")
    (step,) = forecast_of(tmp_path, lines, *own).steps
    pairs = sum(n * (p + n / 2) for n, p in [(20, 0), (10, 20), (30, 20), (40, 0), (6, 40), (8, 40), (25, 0)])
    assert (step.trees.rows_tokens, step.trees.tokens, step.trees.distinct_tokens) == (199, 139, 139)
    assert step.trees.step_s == pytest.approx(3 * 139 + 1.5 * pairs)
    assert step.trees.limit_s == pytest.approx(step.trees.step_s)


@pytest.mark.parametrize(
    ("max_length", "long_samples", "samples", "saved"),
    [(150, "split", 5, 2 * 100), (90, "split", 8, 2 * 90), (90, "truncate", 3, 2 * 90), (170, "drop", 2, 100)],
)
def test_what_is_left_of_a_prompt_in_a_cut_sample_is_shared(tmp_path, max_length, long_samples, samples, saved):
    cut = (f"data.max_length={max_length}", f"data.long_samples={long_samples}")
    lines = [{"prompt": 100, "completions": [20, 60, 180]}] * 32
    (step,) = forecast_of(tmp_path, lines, *cut, f"train.global_batch_size={32 * samples}").steps
    assert len(step.ours.plan.lengths) == 32 * samples
    assert step.trees.rows_tokens - step.trees.distinct_tokens == 32 * saved


def test_lengths_alone_say_nothing_of_trees(tmp_path):
    result = forecast_of(tmp_path, [{"length": 500 + k} for k in range(64)]).to_json()
    assert "trees" not in result["steps"][0]
    assert "distinct" not in shown(result)


def shown(result):
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table_of_plan(result))
    return " ".join(captured.get().split())


def test_the_table_says_what_trees_gain_and_json_has_the_same(tmp_path):
    result = forecast_of(tmp_path, GROUPS, steps=2).to_json()
    text, every = shown(result), [step["trees"] for step in result["steps"]]
    rows, distinct, computed = (sum(one[f"{key}tokens"] for one in every) for key in ("rows_", "distinct_", ""))
    assert f"{rows / distinct:.1f}x fewer tokens: {rows:,} tokens of rows, {distinct:,} distinct" in text
    gain = sum(step["step_s"] for step in result["steps"]) / sum(one["step_s"] for one in every)
    assert f"trees {computed:,}" in text
    assert f"{gain:.2f}x" in text
    assert "not planned" not in text


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("plugins.packing.trees=false", "they need plugins.packing with trees and"),
        ("plugins.packing.enabled=false", "they need plugins.packing with trees and"),
        ("plugins.packing.equal_size=true", "without padded, equal_size and group_size"),
        ("plugins.packing.group_size=8", "without padded, equal_size and group_size"),
        ("plugins.packing.max_tokens=512", "samples within its max_tokens"),
        ("plugins.mesh.enabled=true", "neither plugins.mesh nor parallel.cp"),
        ("parallel.cp=2", "neither plugins.mesh nor parallel.cp"),
    ],
)
def test_where_trees_are_not_planned_the_table_says_why_and_what_they_could_gain(tmp_path, setting, why):
    result = forecast_of(tmp_path, GROUPS, setting).to_json()
    (trees,) = (step["trees"] for step in result["steps"])
    assert trees["tokens"] is trees["step_s"] is None
    assert why in trees["why_not"]
    text = shown(result)
    assert f"trees are not planned: {trees['why_not']}" in text
    assert f"{trees['distinct_tokens']:,} distinct" in text


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.pp=2", "plugins.pipeline.enabled=true"),
        ("trainer=transformers",),
        ("trainer=deepspeed", "deepspeed.zero_stage=3"),
    ],
)
def test_trees_gain_in_every_layout(tmp_path, settings):
    (step,) = forecast_of(tmp_path, GROUPS, *settings).steps
    assert step.trees.limit_s < step.trees.step_s < step.ours.outcome.step_s


def test_groups_are_given_once(tmp_path):
    np.savetxt(tmp_path / "numbers.txt", np.ones(128), "%d")
    for more in ({"groups": tmp_path / "numbers.txt"}, {}):
        setting = "data.group=null" if more else "data.group=prompt"
        with pytest.raises(EvenloadError, match="prompts with their completions are groups already"):
            forecast_of(tmp_path, GROUPS, setting, **more)
