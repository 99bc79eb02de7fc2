"""Runs whose shares follow their losses: by the policy's equation, on both trainers, killed and gone on with too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.policies import SeenDomains
from evenload.core.recipe.recipe import Recipe, parse
from evenload.training.checkpoint.manifest import read as load_manifest
from evenload.training.mixing import MixRun

load_plugins()
RECIPE = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}
data:
  max_length: 256
  domains:
    long: {source: long.jsonl, share: 2}
    never: {source: short.jsonl, share: 0}
    short: {source: short.jsonl}
train: {steps: 6, global_batch_size: 8, lr: 1.0e-2}
checkpoint: {dir: kept, every: 2, keep: 9}
plugins:
  packing: {enabled: true, max_tokens: 512}
  data: {enabled: true, mix: {policy: odm, settings: {scale: 4.0, smoothing: 0.5}}}
"""
DOMAINS: dict[str, Any] = {name: {"source": name, "share": share} for name, share in (("a", 1), ("b", 0), ("c", 3))}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two kinds of samples, of which one is learned sooner, and a recipe."""
    for name, count, period in (("long", 30, 5), ("short", 25, 251)):
        rows = [{"input_ids": [(7 * i + k * k) % period for k in range(40 + 37 * i % 200)]} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def ran(place: Path, forged: Callable[..., Any], log: str, *words: str) -> list[dict[str, Any]]:
    """The lines of a log after a run has added its own."""
    done = forged(place, "train", "recipe.yaml", *words, f"log.jsonl={log}", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (place / log).read_text().splitlines()]


def refuse_other_shares(lines: list[dict[str, Any]]) -> None:
    """ODM as its paper has it, of the losses that the log tells: what step t shows moves the shares of step t + 2."""
    names, shares, rewards = ["long", "short"], [2 / 3, 1 / 3], [0.0, 0.0]
    assert lines[0]["shares"] == {"long": 2 / 3, "never": 0.0, "short": 1 / 3}
    assert lines[1]["shares"] == lines[0]["shares"]
    explored = [0.5] + [min(0.5, math.sqrt(math.log(2) / (2 * step))) for step in range(1, 9)]
    for number, (line, after_next) in enumerate(zip(lines, lines[2:], strict=False), 1):
        for place, name in enumerate(names):
            if name in line["domains"]:
                rewards[place] = 0.5 * rewards[place] + 0.5 * 4.0 * line["domains"][name]["loss"]
        odds = [math.exp(explored[number - 1] * reward) for reward in rewards]
        shares = [(1 - 2 * explored[number]) * odd / sum(odds) + explored[number] for odd in odds]
        assert [after_next["shares"][name] for name in names] == pytest.approx(shares, rel=1e-12)
    due, credits = [0, 0], [0.0, 0.0]
    for line in lines:
        for place, name in enumerate(names):
            due[place] += line["domains"].get(name, {"samples": 0})["samples"]
            credits[place] += 8 * line["shares"][name]
    assert due == pytest.approx(credits, abs=1)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_shares_that_it_would_have_had(place: Path, forged: Callable[..., Any]) -> None:
    """On 4 ranks, then 2, 1, and 4 that share tensors and stages; losses differ by rounding, and shares with them."""
    words = "trainer=megatron", "train.dtype=fp64"
    whole = ran(place, forged, "whole.jsonl", *words, "parallel.dp=2", "checkpoint.dir=whole", "train.steps=8")
    refuse_other_shares(whole)
    assert whole[2]["shares"] != whole[5]["shares"]
    shared = "parallel.dp=null", "parallel.tp=2", "parallel.pp=2", "plugins.pipeline.enabled=true"
    for layout, until in ((("parallel.dp=4",), 2), (("parallel.dp=2",), 4), (("parallel.dp=1",), 6), (shared, 8)):
        lines = ran(place, forged, "parts.jsonl", *words, *layout, f"train.steps={until}")
    assert [line["samples"] for line in lines] == [line["samples"] for line in whole]
    for one, other in zip(lines, whole, strict=True):
        assert one["shares"] == pytest.approx(other["shares"], rel=1e-9)
    states = [load_manifest(place / folder / "step00000008").state["mix"]["state"] for folder in ("kept", "whole")]
    # The last two steps had another TP, under which Megatron has pieces of the loss in float32.
    assert states[0]["rewards"] == pytest.approx(states[1]["rewards"], rel=1e-6)


@pytest.mark.slow
def test_shares_follow_losses_under_deepspeed_too(place: Path, forged: Callable[..., Any]) -> None:
    refuse_other_shares(ran(place, forged, "log.jsonl", "trainer=deepspeed", "parallel.dp=2", "deepspeed.zero_stage=2"))


def recipe_of(policy: str = "odm", every: int = 1, **settings: Any) -> Recipe:
    mix = {"policy": policy, "every": every, "settings": settings}
    return parse({"data": {"domains": DOMAINS}, "plugins": {"data": {"enabled": True, "mix": mix}}})


def begun(recipe: Recipe) -> MixRun:
    run = MixRun.begin(recipe, ["a", "b", "c"], [100, 70, 400])
    assert run is not None
    return run


def shown(step: int) -> SeenDomains:
    targets = np.array([30 + step, 0, 50])
    return SeenDomains(targets * (2.0, 0.0, 1.0 + step % 4), targets, np.array([3, 0, 5]))


@pytest.mark.parametrize("every", [1, 3])
def test_what_is_saved_goes_on_to_the_last_bit(every: int) -> None:
    recipe = recipe_of(every=every, scale=3.0)
    runs = [begun(recipe)]
    for step in range(9):
        runs.append(runs[-1].after(shown(step)))
    for kill in range(9):
        run = begun(recipe).resumed(json.loads(json.dumps(runs[kill].saved())))
        assert run is not None
        for step in range(kill, 9):
            run = run.after(shown(step))
            assert run.shares == runs[step + 1].shares
    changes = sum(one.shares != other.shares for one, other in pairwise(runs))
    assert changes == 9 // every
    assert all(run.shares[1] == 0 for run in runs), "nothing of it was asked for"


def test_a_policy_that_is_asked_every_third_step_sees_their_sums() -> None:
    run, sums = begun(recipe_of(every=3)), begun(recipe_of())
    parts = [shown(step) for step in range(3)]
    for part in parts:
        run = run.after(part)
    whole = SeenDomains(*(sum(values) for values in list(zip(*parts, strict=True))[:3]))
    assert run.state == sums.after(whole).state


def test_shares_by_size_hold_from_the_first_batch_on() -> None:
    run = begun(recipe_of("temperature", tau=2.0))
    assert run.shares == pytest.approx((1 / 3, 0, 2 / 3))
    assert run.shares_at({}, 0) == run.shares


def test_what_other_domains_or_settings_have_taught_is_left() -> None:
    saved = begun(recipe_of()).after(shown(0)).saved()
    assert begun(recipe_of(scale=2.0)).resumed(saved) is None
    assert begun(recipe_of("ado")).resumed(saved) is None
    other = MixRun.begin(recipe_of(), ["a", "b", "d"], [1, 1, 1])
    assert other is not None
    assert other.resumed(saved) is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"plugins": {"data": {"enabled": True, "mix": {"policy": "odmm"}}}}, "did you mean 'odm'"),
        ({"plugins": {"data": {"enabled": True}}}, "without a policy the plugin does nothing"),
        ({"plugins": {"data": {"enabled": True, "mix": {"policy": "odm", "settings": {"rate": 1}}}}}, "no key 'rate'"),
        ({"plugins": {"data": {"enabled": True, "mix": {"policy": "doremi"}}}}, "needs what no run shows it"),
        ({"data": {}}, "a policy moves shares of domains, and there are none"),
        ({"train": {"epochs": 1}}, "shares which change do not tell"),
        (
            {"data": {"domains": DOMAINS, "mix": {"policy": "schedule", "points": [{"step": 0, "shares": {}}]}}},
            "a schedule and a policy both move the shares",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_rank_starts(changes: dict[str, Any], what: str) -> None:
    recipe = {"data": {"domains": DOMAINS}, "plugins": {"data": {"enabled": True, "mix": {"policy": "odm"}}}}
    with pytest.raises(EvenloadError, match=what):
        parse({**recipe, **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data.domains.c.weight": 2.0}, "data.domains.c.weight"),
        ({"plugins.data.weight": {"policy": "loss"}}, "plugins.data.weight"),
    ],
)
def test_an_objective_beside_other_weights_is_refused(changes: dict[str, Any], what: str) -> None:
    mix = {"enabled": True, "reference": "losses", "mix": {"policy": "doremi"}}
    recipe = parse({"data": {"domains": DOMAINS}, "plugins": {"data": mix}})
    assert begun(recipe).objective == (0.5, 0.0, 0.5), "what has no share has no part in the loss"
    with pytest.raises(EvenloadError, match="and so does the recipe") as refused:
        begun(recipe.changed(changes))
    assert refused.value.found == what


def test_an_objective_goes_on_to_the_last_bit() -> None:
    mix = {"enabled": True, "reference": "losses", "mix": {"policy": "doremi"}}
    recipe = parse({"data": {"domains": DOMAINS}, "plugins": {"data": mix}})
    runs = [begun(recipe)]
    for step in range(6):
        runs.append(runs[-1].after(shown(step)._replace(excess=np.array([3.0 + step, 0.0, 1.0]))))
    for kill in range(6):
        run = begun(recipe).resumed(json.loads(json.dumps(runs[kill].saved())))
        assert run is not None
        for step in range(kill, 6):
            run = run.after(shown(step)._replace(excess=np.array([3.0 + step, 0.0, 1.0])))
            assert run.drawn_by == runs[step + 1].drawn_by
    alphas = np.mean([run.answer.objective for run in runs[1:]], axis=0)
    assert runs[-1].outcome == pytest.approx({"a": alphas[0], "c": alphas[1]}, rel=1e-12)
    assert runs[-1].objective_at(runs[2].drawn_by) == list(runs[2].objective or ())
