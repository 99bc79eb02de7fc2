"""Divisors of weighted losses that are given: known from the samples that were drawn, whatever their weights are."""

import json

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.recipe.recipe import parse
from evenload.plugins.lora.state.drawing import union
from evenload.plugins.lora.tenant_file import parse_tenant
from evenload.runtime.attention.labels import checked_divisor, count_targets, part_of
from evenload.training.drawing import draw_of
from evenload.training.job import Job
from evenload.training.preflight import preflight

ROWS = [{"prompt": "a" * n, "completion": "b" * (2 + n % 3), "w": [0, 1.5, -1.5][n % 3]} for n in range(1, 25)]
COUNTS = np.array([len(row["completion"]) for row in ROWS])


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """The job of a recipe on these rows."""
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "cache"))

    def job_of(rows=ROWS, size=12, **data):
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = {"source": str(tmp_path / "rows.jsonl"), "weight_column": "w", **data}
        if "domains" in data:
            del data["source"]
        ready = preflight(parse({"data": data, "train": {"global_batch_size": size}}))
        return Job(ready.recipe, None, None, ready.chain, None, ready.source)

    return job_of


@pytest.mark.parametrize("asked", ["tokens", "sequences", 6.5, None])
def test_a_divisor_counts_whatever_was_drawn(asked, opened):
    job = opened(weight_divisor=asked)
    drawing = job.drawing()
    draws = [drawing(), drawing()]
    assert sum(draw.without_target for draw in draws) == 8, "rows of weight 0"
    if asked == "sequences":
        assert [draw.divisor for draw in draws] == [12, 12]
    elif asked == "tokens":
        assert sum(draw.divisor for draw in draws) == COUNTS.sum()
        left = [draw.divisor - COUNTS[draw.samples].sum() for draw in draws]
        assert left == [2 * draw.without_target for draw in draws], "those of weight 0 have two tokens each"
    else:
        assert [draw.divisor for draw in draws] == [asked] * 2
    for draw in draws:
        labels = job.labels_of(draw)
        assert labels.weights.divisor == draw.divisor
        assert asked is None or checked_divisor(draw.lengths, labels) == draw.divisor
        assert labels.weights.sums.tolist() == [ROWS[i]["w"] * COUNTS[i] for i in draw.samples]


def test_a_divisor_is_that_of_what_a_sample_keeps(opened):
    """Of a row that is truncated the tokens that are left count, those of weight 0 at its end too."""
    rows = [{"text": "abcdefgh", "w": [1.0, -1.0, 0, 0, 0, 0, 0]}, {"text": "abc", "w": 1}]
    source = opened(rows, size=2, weight_divisor="tokens", max_length=5, long_samples="truncate").source
    assert source.lengths.tolist() == [3, 3]
    assert source.targets.tolist() == [2, 2]
    assert source.divisor.tolist() == [4, 2]
    assert draw_of(source, np.array([1, 0])).divisor == 6.0


def test_weights_of_one_have_the_divisor_too(opened):
    job = opened([{**row, "w": 1} for row in ROWS], weight_divisor="sequences")
    draw = job.drawing()()
    labels = job.labels_of(draw)
    assert draw.weight_sums.tolist() == COUNTS[draw.samples].tolist()
    assert checked_divisor(draw.lengths, labels) == 12
    assert labels.weights.of(0).tolist() == [1.0] * draw.lengths[0]


def test_a_mixture_has_the_divisor_of_what_it_draws(opened, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    domains = {name: {"source": str(tmp_path / f"{name}.jsonl")} for name in ("one", "two")}
    assert opened(domains=domains, weight_divisor="sequences").drawing()().divisor == 12
    assert opened(domains=domains, weight_divisor=0.25).drawing()().divisor == 0.25
    source = opened(domains=domains, weight_divisor="tokens").source
    assert source.divisor.tolist() == [*COUNTS, *COUNTS]


def test_every_tenant_has_its_own(opened):
    draws = {number: opened(weight_divisor=asked).drawing()() for number, asked in ((3, "sequences"), (5, None))}
    together = union(draws)
    assert together.divisor == {3: 12}
    assert union({5: draws[5]}).divisor is None
    job = opened()
    labels = job.labels_of(together)
    for number, wanted in ((3, 12), (5, draws[5].own_sums.sum())):
        places = np.flatnonzero(together.tenants == number)
        assert labels.weights.divisor_of(places, number) == wanted
        own = part_of(labels, places, number)
        assert own.weights.divisor_of() == wanted
        assert count_targets(together.lengths[places], own) == draws[number].targets.sum()


def test_the_gradient_of_a_policy_is_what_its_expectation_says(opened):
    """A policy of two strategies, each taken with a chance of one half: a short one whose reward is 1, and a long one
    of 0.6, so that d E[reward] / d theta = 0.25 (1 - 0.6). Groups of two, advantages against the other one's reward:
    those of half of all groups are 0 and still count among the sequences."""
    random, groups, batches = np.random.default_rng(3), 8, 300
    short = random.random((batches * groups, 2)) < 0.5
    rewards = np.where(short, 1.0, 0.6)
    advantages = (rewards - rewards[:, ::-1]).ravel()
    rows = [
        {"prompt": "?", "completion": "a" if is_short else "bcd", "w": advantage}
        for is_short, advantage in zip(short.ravel().tolist(), advantages.tolist(), strict=True)
    ]
    job = opened(rows, size=2 * groups, weight_divisor="sequences")
    drawing, theta, found = job.drawing(), torch.zeros((), requires_grad=True), []
    for _ in range(batches):
        draw = drawing()
        tokens_of, labels = job.tokens_of(draw), job.labels_of(draw)
        first_losses = {
            ord("a"): -torch.nn.functional.logsigmoid(theta),
            ord("b"): -torch.nn.functional.logsigmoid(-theta),
        }
        loss = sum(labels.weights.of(i)[1] * first_losses[int(tokens_of(i)[1])] for i in range(len(draw.samples)))
        (gradient,) = torch.autograd.grad(loss / checked_divisor(draw.lengths, labels), theta)
        found.append(float(gradient))
    error = np.std(found, ddof=1) / np.sqrt(batches)
    assert error < 0.005
    assert abs(np.mean(found) + 0.1) < 3 * error


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"weight_divisor": 0}, "data.weight_divisor"),
        ({"weight_divisor": -2.5}, "data.weight_divisor"),
        ({"weight_divisor": float("nan")}, "data.weight_divisor"),
        ({"weight_divisor": float("inf")}, "data.weight_divisor"),
        ({"weight_divisor": "token"}, "tokens"),
        ({"weight_divisor": "tokens", "weight_column": None}, "there are none"),
    ],
)
def test_what_divides_nothing_is_refused(data, text, opened):
    with pytest.raises(EvenloadError, match=text):
        opened(**data)
    with pytest.raises(EvenloadError, match=text):
        parse_tenant(json.dumps({"data": {"source": "rows.jsonl", "weight_column": "w", **data}}), "acme")


@pytest.mark.parametrize("kind", ["mix", "weight"])
def test_policies_by_mean_losses_are_refused(kind):
    data = {"weight_column": "w", "weight_divisor": 8}
    data |= {"domains": {name: {"source": f"{name}.jsonl"} for name in "ab"}}
    plugins = {"data": {"enabled": True, kind: {"policy": {"mix": "odm", "weight": "loss"}[kind]}}}
    with pytest.raises(EvenloadError, match=f"a {kind} policy needs a loss that is divided by what its weights add up"):
        parse({"data": data, "plugins": plugins})
