"""Runs whose shares follow their losses: by the policy's equation, on both trainers, killed and gone on with too."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.policies import SeenDomains
from evenload.core.recipe.recipe import parse
from evenload.plugins.data.mixture import MixtureState, first_shares
from evenload.training.checkpoint.manifest import read as load_manifest
from harness.cases import only_full

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
DOMAINS = {name: {"source": name, "share": share} for name, share in (("a", 1), ("b", 0), ("c", 3))}


@pytest.fixture
def place(tmp_path):
    """A folder with two kinds of samples, of which one is learned sooner, and a recipe."""
    for name, count, period in (("long", 30, 5), ("short", 25, 251)):
        rows = [{"input_ids": [(7 * i + k * k) % period for k in range(40 + 37 * i % 200)]} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def lines_of(place, ran, logged):
    """``lines_of("log", "key=value")``: the lines of a log after a run has added its own."""

    def lines(log, *words):
        ran(place, "train", "recipe.yaml", *words, f"log.jsonl={log}")
        return list(logged(place / log))

    return lines


def refuse_other_shares(lines):
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


PIPELINE = "parallel.pp=2", "plugins.pipeline.enabled=true"
LONG = (("parallel.dp=4",), 2), (("parallel.dp=2",), 4), (("parallel.dp=1",), 6), (("parallel.tp=2", *PIPELINE), 8)


@pytest.mark.slow
@pytest.mark.parametrize("chain", [((("parallel.dp=1",), 4), (PIPELINE, 8)), only_full(LONG)])
def test_a_killed_run_goes_on_with_the_shares_that_it_would_have_had(chain, place, lines_of):
    """On other ranks each time; losses differ by rounding, and shares with them."""
    words = "trainer=megatron", "train.dtype=fp64"
    whole = lines_of("whole.jsonl", *words, "parallel.dp=2", "checkpoint.dir=whole", "train.steps=8")
    refuse_other_shares(whole)
    assert whole[2]["shares"] != whole[5]["shares"]
    for layout, until in chain:
        lines = lines_of("parts.jsonl", *words, *layout, f"train.steps={until}")
    assert [line["samples"] for line in lines] == [line["samples"] for line in whole]
    for one, other in zip(lines, whole, strict=True):
        assert one["shares"] == pytest.approx(other["shares"], rel=1e-9)
    states = [load_manifest(place / folder / "step00000008").state["mix"]["state"] for folder in ("kept", "whole")]
    # The last two steps had another TP, under which Megatron has pieces of the loss in float32.
    assert states[0]["rewards"] == pytest.approx(states[1]["rewards"], rel=1e-6)


@pytest.mark.slow
def test_shares_follow_losses_under_deepspeed_too(lines_of):
    refuse_other_shares(lines_of("log.jsonl", "trainer=deepspeed", "parallel.dp=2", "deepspeed.zero_stage=2"))


def recipe_of(policy="odm", every=1, **settings):
    mix = {"policy": policy, "every": every, "settings": settings}
    return parse({"data": {"domains": DOMAINS}, "plugins": {"data": {"enabled": True, "mix": mix}}})


def begun(recipe, names=("a", "b", "c"), samples=(100, 70, 400)):
    return MixtureState.begin(recipe, recipe.data_policy("mix"), names, samples)


def seen(step):
    targets = np.array([30 + step, 0, 50])
    return SeenDomains(targets * (2.0, 0.0, 1.0 + step % 4), targets, np.array([3, 0, 5]))


def unbroken(recipe, seen):
    """A run after each of nine steps; what goes on from any of them is the same to the last bit."""
    runs = [begun(recipe)]
    for step in range(9):
        runs.append(runs[-1].after(seen(step)))
    for kill in range(9):
        run = begun(recipe).resumed(json.loads(json.dumps(runs[kill].saved())))
        for step in range(kill, 9):
            run = run.after(seen(step))
            assert run.share_record == runs[step + 1].share_record
    return runs


@pytest.mark.parametrize("every", [1, 3])
def test_what_is_saved_goes_on_to_the_last_bit(every):
    runs = unbroken(recipe_of(every=every, scale=3.0), seen)
    changes = sum(one.share_record != other.share_record for one, other in pairwise(runs))
    assert changes == 9 // every
    assert all(run.share_record["shares"][1] == 0 for run in runs), "nothing of it was asked for"


def test_a_policy_that_is_asked_every_third_step_sees_their_sums():
    run, sums = begun(recipe_of(every=3)), begun(recipe_of())
    parts = [seen(step) for step in range(3)]
    for part in parts:
        run = run.after(part)
    whole = SeenDomains(*(sum(values) for values in list(zip(*parts, strict=True))[:3]))
    assert run.state == sums.after(whole).state


def test_shares_by_size_hold_from_the_first_batch_on():
    run = begun(recipe_of("temperature", tau=2.0))
    assert run.share_record == {"shares": pytest.approx([1 / 3, 0, 2 / 3])}
    first = first_shares(recipe_of("temperature", tau=2.0), ["a", "b", "c"], [100, 70, 400])
    assert first == run.share_record


def test_what_other_domains_or_settings_have_taught_is_left():
    saved = begun(recipe_of()).after(seen(0)).saved()
    for one in (begun(recipe_of(scale=2.0)), begun(recipe_of("ado")), begun(recipe_of(), ("a", "b", "d"))):
        with pytest.raises(ValueError, match="are others"):
            one.resumed(saved)


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
def test_what_cannot_be_done_is_refused_before_a_rank_starts(changes, what):
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
def test_an_objective_beside_other_weights_is_refused(changes, what):
    mix = {"enabled": True, "reference": "losses", "mix": {"policy": "doremi"}}
    recipe = parse({"data": {"domains": DOMAINS}, "plugins": {"data": mix}})
    assert begun(recipe).share_record["objective"] == [0.5, 0.0, 0.5], "what has no share has no part in the loss"
    with pytest.raises(EvenloadError, match="and so does the recipe") as refused:
        begun(recipe.changed(changes))
    assert refused.value.found == what


def test_an_objective_goes_on_to_the_last_bit():
    mix = {"enabled": True, "reference": "losses", "mix": {"policy": "doremi"}}
    recipe = parse({"data": {"domains": DOMAINS}, "plugins": {"data": mix}})
    runs = unbroken(recipe, lambda step: seen(step)._replace(excess=np.array([3.0 + step, 0.0, 1.0])))
    alphas = np.mean([run.answer.objective for run in runs[1:]], axis=0)
    assert runs[-1].outcome == pytest.approx({"a": alphas[0], "c": alphas[1]}, rel=1e-12)
