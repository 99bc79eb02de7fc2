"""Groups that rows of the data name stay together, from the source to the plan of each step."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.planner import Planner
from evenload.core.recipe.recipe import parse
from evenload.data.samples.order import BatchSize, SampleOrder
from evenload.data.samples.whole_groups import WholeGroups
from evenload.training.forecast.forecast import look_ahead
from evenload.training.job import Job
from evenload.training.preflight import preflight
from hypothesis import given
from hypothesis import strategies as st

SIZES = [3, 1, 5, 2, 4, 3, 6, 1]
"""Samples of each group."""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Rows of groups that lie scattered over the file, of which every ninth carries no loss."""
    monkeypatch.setenv("EVENLOAD_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(4)
    ids = rng.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    rows = [
        {"prompt": "p" * int(rng.integers(1, 60)), "completion": "c" * (i % 9), "of": f"prompt {one}"}
        for i, one in enumerate(ids)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return parse(
        {
            "data": {"source": str(tmp_path / "rows.jsonl"), "group": "of", "max_length": 128},
            "parallel": {"dp": 2},
            "train": {"global_batch_size": 8},
            "plugins": {"packing": {"enabled": True, "max_tokens": 256}},
        }
    )


def job_of(recipe):
    ready = preflight(recipe)
    return Job(ready.recipe, None, None, ready.chain, None, ready.source)


def test_every_step_has_whole_groups_each_on_one_rank(recipe):
    job = job_of(recipe)
    names = [json.loads(line)["of"] for line in Path(recipe.data.source).read_text().splitlines()]
    planner, drawn = Planner(job.chain, job.drawing(), background=False), Counter()
    with_loss = Counter(name for i, name in enumerate(names) if i % 9)
    while drawn.total() < with_loss.total():
        planned = planner.next()
        of_names, samples = defaultdict(set), planned.draw.samples.tolist()
        for m in planned.plan.micro_batches:
            for one in m.slices:
                of_names[names[samples[one.sequence]]].add(m.ranks)
        assert all(len(ranks) == 1 for ranks in of_names.values())
        counts = Counter(names[sample] for sample in samples)
        assert all(counts[name] == with_loss[name] for name in counts), "a group is in one batch"
        assert len(planned.plan.groups) == len(samples)
        drawn += counts
    assert drawn == with_loss


def test_a_run_goes_on_with_the_groups_that_are_left(recipe):
    job = job_of(recipe)
    drawing = job.drawing()
    first, *rest = [drawing() for _ in range(6)]
    again = job.drawing(json.loads(json.dumps(first.state)))
    for one in rest:
        other = again()
        assert one.samples.tolist() == other.samples.tolist()
        assert one.groups.tolist() == other.groups.tolist()
    with pytest.raises(EvenloadError, match="not the data of the checkpoint"):
        job_of(recipe.changed({"data.group": None})).drawing(first.state)


def test_whole_groups_of_domains_are_drawn_by_their_shares(recipe, tmp_path):
    """Groups of two domains that have the same names are others, each whole in one batch and on one rank."""
    rng = np.random.default_rng(8)
    rows = [{"prompt": "q" * int(rng.integers(1, 40)), "completion": "d", "of": f"prompt {i // 3}"} for i in range(24)]
    (tmp_path / "more.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    domains = {"more": {"source": str(tmp_path / "more.jsonl")}, "rows": {"source": recipe.data.source, "share": 2}}
    mixed = recipe.changed({"data": {"domains": domains, "group": "of", "max_length": 128}})
    job = job_of(mixed)
    own = {
        name: [json.loads(line)["of"] for line in Path(one["source"]).read_text().splitlines()]
        for name, one in domains.items()
    }
    with_loss = {
        name: Counter(of for i, of in enumerate(names) if i % 9 or name == "more") for name, names in own.items()
    }
    planner, drawn = Planner(job.chain, drawing := job.drawing(), background=False), Counter()
    for step in range(12):
        planned = planner.next()
        named = drawing._domains.mixture.numbers.named(planned.draw.samples)
        groups, ranks = defaultdict(set), defaultdict(set)
        for m in planned.plan.micro_batches:
            for one in m.slices:
                name, number = named[one.sequence]
                ranks[name, own[name][number]].add(m.ranks)
        for (name, number), group in zip(named, planned.plan.groups.tolist(), strict=True):
            groups[group].add((name, own[name][number]))
        assert all(len(where) == 1 for where in ranks.values()), f"step {step}"
        assert all(len(names) == 1 for names in groups.values())
        counts = Counter((name, own[name][number]) for name, number in named)
        assert all(count % with_loss[name][of] == 0 for (name, of), count in counts.items())
        drawn.update(name for name, _ in named)
    assert 1.5 < drawn["rows"] / drawn["more"] < 2.5
    again = job.drawing(json.loads(json.dumps(planned.draw.state)))
    assert again().samples.tolist() == drawing().samples.tolist()
    with pytest.raises(EvenloadError, match="the domain more: the data is not the data of the checkpoint"):
        job_of(mixed.changed({"data.group": None})).drawing(planned.draw.state)
    with pytest.raises(EvenloadError, match="lengths of domains say no groups"):
        look_ahead(mixed, {name: np.arange(1, 30) for name in domains}, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20), st.booleans(), st.integers(0, 9))
def test_batches_are_the_fewest_groups_that_fill_them(ids, size, tokens, seed):
    groups = np.unique(ids, return_inverse=True)[1]
    lengths = np.random.default_rng(seed).integers(2, 9, len(ids))
    whole = WholeGroups(groups, lengths, BatchSize(1, size) if tokens else BatchSize(size))
    order, drawn, steps = SampleOrder(whole.num_groups, seed), [], 0
    while order.epoch == 0:
        taken, order = whole.take(order)
        weights = np.bincount(groups[taken], lengths[taken] if tokens else None)
        last = groups[taken[-1]]
        assert weights.sum() - weights[last] < size
        assert weights.sum() >= size or order.epoch
        drawn += taken.tolist()
        steps += 1
    assert sorted(drawn) == list(range(len(ids)))
    assert steps == whole.steps(seed, epochs=1)


def test_lengths_of_rows_say_their_groups(recipe, tmp_path):
    rows = [{"length": 10 + i, "of": i % 3} for i in range(24)]
    (tmp_path / "lengths.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for step in look_ahead(recipe, tmp_path / "lengths.jsonl", 3).steps:
        plan = step.ours.plan
        assert len(set(plan.groups.tolist())) == 1
        assert len({m.ranks for m in plan.micro_batches if m.slices}) == 1
        assert len({(length - 10) % 3 for length in plan.lengths.tolist()}) == 1
    np.savetxt(tmp_path / "lengths.txt", np.arange(10, 34), "%d")
    with pytest.raises(EvenloadError, match=r"lengths say no groups\n.*data\.group 'of'"):
        look_ahead(recipe, tmp_path / "lengths.txt", 1)


def test_what_cannot_stay_together_is_refused_before_any_rank_starts(recipe):
    def refused(changes, match):
        with pytest.raises(EvenloadError, match=match):
            preflight(recipe.changed(changes))

    small = {"plugins.packing.groups_in": "micro_batch", "plugins.packing.max_tokens": 130}
    refused(small, "a group of samples that stays in one micro-batch is longer than plugins.packing.max_tokens")
    preflight(recipe.changed({**small, "plugins.packing.max_tokens": 600}))
    refused({"plugins.packing.group_size": 4}, "two settings say which samples stay together")
    refused({"plugins.packing.max_delay_steps": 2}, "cannot be planned one by one\n.*wait for a later step")
    refused({"plugins.packing.padded": True}, "cannot be planned one by one\n.*padded")
    refused({"plugins.packing.enabled": False}, r"enable plugins\.packing")
    refused({"plugins.mesh.enabled": True}, r"disable plugins\.mesh, or ask for no groups")
    refused(
        {"train.max_tokens": 500, "train.steps": None}, "steps of whole groups of samples are not counted in tokens"
    )
    with pytest.raises(EvenloadError, match="samples of tenants are in no groups"):
        recipe.changed({"plugins.packing.enabled": False, "plugins.lora.enabled": True})


def test_epochs_of_groups_are_counted_before_the_first_step(recipe):
    for more in ({}, {"train.global_batch_size": None, "train.global_batch_tokens": 300}):
        job = job_of(recipe.changed({"train.epochs": 2, "train.steps": None, **more}))
        drawing, steps = job.drawing(), 0
        while (order := drawing().state)["epoch"] < 2:
            steps += 1
        assert steps + 1 == job.recipe.train.steps, order
