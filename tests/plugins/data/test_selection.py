"""Selections beside a loop without a model: what is drawn, what is taken, and what a run that goes on takes."""

import json
import logging
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.plugins.data import selection as selections
from evenload.plugins.data.draws import drawn
from evenload.plugins.data.files import refuse_policies
from evenload.plugins.data.scoring import PoolGradients
from evenload.plugins.data.selection import Selection
from evenload.plugins.data.selects import LossThirds, third_probabilities
from evenload.training.drawing import Domains, drawing_of
from evenload.training.preflight import open_data
from evenload.training.step_hooks import StepHooks

BATCH, STEPS = 4, 9


class Steps:
    """Draws as a planner does: one batch ahead, where it may."""

    def __init__(self, recipe, kept=None):
        source = open_data(recipe)
        self.recipe, self.drawing = recipe, drawing_of(recipe, source, CHAIN, kept and kept["order"])
        job = SimpleNamespace(recipe=recipe, source=source, domains=Domains.of_source(recipe, source))
        self.step, self.asked = (kept["step"] if kept else 0), []
        self.selection = Selection(job, recipe.data_policy("select"), self, self.drawing)
        if kept:
            StepHooks([self.selection]).restore(kept)
        self.draw_of_next = None

    def means(self, samples):
        """Losses that depend on the weights, which are those before the step that comes."""
        self.asked.append((self.step, samples.tolist()))
        return losses_at(self.step, samples)

    def next(self):
        ahead = self.selection.before(self)
        draw = self.draw_of_next or self.drawing()
        self.draw_of_next = self.drawing() if ahead >= 1 else None
        self.step += 1
        return draw


class Rows:
    """Gradients that depend on the sample alone, beside two of each of two tasks; notes who was asked for."""

    asked: ClassVar[list[list[int]]] = []

    def __init__(self, job):
        self.seconds = 0.0
        Rows.asked = []

    def of(self, samples):
        Rows.asked.append(samples.tolist())
        return PoolGradients(ROWS[samples], WANTED, TASKS) if len(samples) else PoolGradients(ROWS[:0], ROWS[:0], None)


ROWS = np.random.default_rng(2).normal(size=(64, 6))
WANTED, TASKS = np.random.default_rng(3).normal(size=(4, 6)), np.array([0, 1, 1, 0])


@pytest.fixture(autouse=True)
def gradients(monkeypatch):
    monkeypatch.setattr(selections, "GradientScorer", Rows)


CHAIN = PlanChain.of_recipe(parse({"plugins": {"packing": {"enabled": True, "max_tokens": 512}}}), parse({}).layout(1))


def losses_at(step, samples):
    return np.abs(np.sin(samples * 12.9898)) * 5 / (1 + 0.1 * step)


def flat(batches):
    return [sample for batch in batches for sample in batch]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("long", 40), ("short", 24)):
        ids = [list(range(2 + 7 * i % 40)) for i in range(count)]
        rows = [{"input_ids": own, "labels": [-100] * len(own) if i == 5 else own} for i, own in enumerate(ids)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).normal(size=(64, 3)))
    np.save(tmp_path / "wanted.npy", np.random.default_rng(1).normal(size=(5, 3)))
    domains = {name: {"source": str(tmp_path / f"{name}.jsonl")} for name in ("long", "short")}
    data = {"domains": domains, "max_length": 64, "validation": {"source": str(tmp_path / "short.jsonl")}}
    return parse({"data": data, "train": {"global_batch_size": BATCH, "seed": 3}})


def asking(recipe, policy, every=2, pool=3, **more):
    select = {"policy": policy, "every": every, "pool": pool, **more}
    return recipe.changed({"plugins.data": {"enabled": True, "select": select}})


def ran(steps, until):
    """The batches up to a step, and what a checkpoint after each of them keeps."""
    batches, kept = [], []
    while steps.step < until:
        draw = steps.next()
        batches.append(draw.samples.tolist())
        kept.append(json.loads(json.dumps({"step": steps.step, "order": draw.state})))
    return batches, kept


def test_what_is_taken_is_what_the_equation_takes_of_what_was_drawn(recipe):
    steps = Steps(asking(recipe, "loss", settings={"third": "high", "factor": 50.0}))
    batches, _ = ran(steps, STEPS)
    order = drawing_of(recipe, open_data(recipe), CHAIN)
    for update, (step, numbers) in enumerate(steps.asked):
        pool = np.concatenate([order().samples for _ in range(6)])
        targets = np.array([n not in (5, 45) for n in pool.tolist()])
        own = pool[targets][np.sort(np.unique(pool[targets], return_index=True)[1])]
        assert (step, numbers) == (2 * update, own.tolist())
        odds = third_probabilities(losses_at(step, own), LossThirds(third="high", factor=50.0))
        odds = odds if update else np.ones(len(own))
        taken = drawn(own, odds, 2 * BATCH, seed=3, update=update)
        assert flat(batches[step : step + 2]) == taken[: len(flat(batches[step : step + 2]))].tolist()
    assert len(steps.asked) == 5
    report = steps.selection.report(1.0)["selection"]
    assert (report["updates"], report["taken"]) == (5, 5 * 2 * BATCH)


NEAR = {"embeddings": "rows.npy", "queries": "wanted.npy"}
CASES = {
    "loss": {},
    "online": {"every": 1, "pool": 4},
    "random": {"every": 3},
    "delta_loss": {"pool": None, "settings": {"updates": 5}},
    "tsds": {"pool": None, "every": 4, **NEAR},
    "near": {"pool": 2, **NEAR},
    "less": {},
    "cluster_less": {"pool": None, "settings": {"cluster_size": 8}, "embeddings": "rows.npy"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_killed_after_any_step_takes_what_it_would_have_taken(recipe, name):
    asked = asking(recipe, name, **CASES[name])
    batches, kept = ran(Steps(asked), STEPS)
    assert all(len(set(batch)) == BATCH for batch in batches)
    for kill in range(1, STEPS):
        again, states = ran(Steps(asked, kept[kill - 1]), STEPS)
        assert again == batches[kill:]
        assert states == kept[kill:], "to the last bit"


def test_near_takes_the_nearest_of_every_query_from_the_first_batch_on(recipe):
    near = asking(recipe, "near", every=1, pool=None, **NEAR)
    (first, *_), _ = ran(Steps(near), 1)
    rows, wanted = np.load("rows.npy"), np.load("wanted.npy")
    scored = [i for i in range(64) if i not in (5, 45)]
    nearest = [scored[int(np.argmin([np.linalg.norm(rows[i] - query) for i in scored]))] for query in wanted]
    assert first == list(dict.fromkeys(nearest))[:BATCH]


def test_less_takes_what_lies_along_the_gradients_of_one_task(recipe):
    steps = Steps(asking(recipe, "less", every=1, pool=4))
    batches, _ = ran(steps, 3)
    assert Rows.asked[0] == [], "the first samples are any, so no gradient is taken of them"
    wanted = WANTED / np.linalg.norm(WANTED, axis=1, keepdims=True)
    for batch, pool in zip(batches[1:], Rows.asked[1:], strict=True):
        cosines = {n: wanted @ ROWS[n] / np.linalg.norm(ROWS[n]) for n in pool}
        scores = {n: max(own[TASKS == 0].mean(), own[TASKS == 1].mean()) for n, own in cosines.items()}
        assert batch == sorted(pool, key=lambda n: (-scores[n], n))[:BATCH]


def test_clusters_take_gradients_of_their_representatives_alone(recipe):
    steps = Steps(asking(recipe, "cluster_less", 1, None, settings={"cluster_size": 16}, embeddings="rows.npy"))
    _, kept = ran(steps, 2)
    rows = kept[-1]["order"]["select"]["policy"]["representatives"]
    assert Rows.asked == [[], [number for _, number in rows]]
    assert 3 <= len(rows) <= 3 * 4


def test_where_a_policy_fails_samples_go_on_as_they_are_drawn(recipe, caplog):
    steps = Steps(asking(recipe, "loss", every=1, pool=2))
    chosen = steps.selection._chosen

    def failing(state, pool, settings):
        if pool.update == 2:
            raise RuntimeError("planted")
        return chosen.policy.step(state, pool, settings)

    steps.selection._chosen = chosen._replace(policy=chosen.policy._replace(step=failing))
    batches, _ = ran(steps, 4)
    assert batches[2] == steps.asked[2][1][:BATCH]
    assert batches[3] != steps.asked[3][1][:BATCH], "it is asked again"
    assert "samples go on as they are drawn: RuntimeError: planted" in caplog.text


def test_another_selection_than_the_checkpoints_begins_anew(recipe, caplog):
    _, kept = ran(Steps(asking(recipe, "loss", every=4)), 2)
    with caplog.at_level(logging.INFO, "evenload"):
        steps = Steps(asking(recipe, "loss", every=2), kept[-1])
    assert "samples are selected anew" in caplog.text
    steps.next()
    assert steps.asked[0][0] == 2
    plain = drawing_of(recipe, open_data(recipe), CHAIN, kept[-1]["order"])
    assert len(plain().samples) == BATCH, "without a selection the order goes on"


@pytest.mark.parametrize("mix", [{}, {"policy": "schedule", "points": [{"step": 0, "shares": {"long": 0}}]}])
def test_domains_without_a_share_are_in_no_pool(recipe, mix):
    none = recipe.changed({"data.domains.long.share": 0, "data.mix": mix})
    for pool in (None, 2):
        steps = Steps(asking(none, "loss", every=1, pool=pool))
        ran(steps, 2)
        assert steps.asked
        assert all(min(numbers) >= 40 for _, numbers in steps.asked)


def test_a_schedule_of_shares_counts_the_batches_that_are_trained(recipe):
    points = [{"step": 0, "shares": {"short": 0}}, {"step": 3, "shares": {"short": 0}}]
    points += [{"step": 4, "shares": {"long": 0, "short": 1}}]
    moved = recipe.changed({"data.mix": {"policy": "schedule", "points": points}})
    steps = Steps(asking(moved, "loss", every=1, pool=2))
    ran(steps, 6)
    for step, numbers in steps.asked:
        assert {n >= 40 for n in numbers} == ({False} if step <= 3 else {True})


def test_a_pool_of_all_samples_has_the_domains_of_the_step_that_it_is_selected_at(recipe):
    """Update k of those that last two steps is at step 2 k: short samples come from step 4 on, long ones go at 6."""
    points = [(0, {"short": 0}), (3, {"short": 0}), (4, {"short": 1}), (5, {"short": 1}), (6, {"long": 0, "short": 1})]
    mix = {"policy": "schedule", "points": [{"step": step, "shares": shares} for step, shares in points]}
    steps = Steps(asking(recipe.changed({"data.mix": mix}), "loss", every=2, pool=None))
    ran(steps, 8)
    assert [step for step, _ in steps.asked] == [0, 2, 4, 6]
    assert [sorted({n >= 40 for n in numbers}) for _, numbers in steps.asked] == [[False]] * 2 + [[False, True], [True]]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"plugins.data.select.pool": 9}, "more samples than there are"),
        ({"plugins.data.select.embeddings": "few.npy"}, "are not those of the data"),
        ({"plugins.data.select.queries": "flat.npy"}, "are not rows of numbers"),
        ({"plugins.data.select.queries": "other.npy"}, "of unlike models"),
        ({"plugins.data.select.queries": "none.npy"}, "cannot be read"),
        ({"plugins.data.select.queries": "whole.npy"}, "floating-point numbers"),
        ({"plugins.data.select.policy": "neer"}, "did you mean 'near'"),
        ({"plugins.data.select.policy": "less", "data.validation": None}, "needs query_gradients; a run"),
        ({"plugins.data.select.policy": "less", "parallel.cp": 2}, "do not go with static context parallelism"),
        ({"plugins.data.select.policy": "less", "model.family": "mixtral", "model.moe": {}}, "experts have none"),
        ({"plugins.data.select.queries": None}, "set plugins.data.select.queries"),
        ({"train.epochs": 1}, "a number of steps that a selection does not tell"),
        ({"train.global_batch_tokens": 100, "train.global_batch_size": None}, "counts tokens"),
        ({"plugins.data.select": {"policy": "delta_loss", "pool": 2}}, "from the same samples in every update"),
    ],
)
def test_what_cannot_be_selected_is_refused_before_a_rank_starts(recipe, changes, what):
    for name, array in (("few", np.zeros((63, 3))), ("flat", np.zeros(3)), ("other", np.zeros((5, 2)))):
        np.save(f"{name}.npy", array)
    np.save("whole.npy", np.zeros((5, 3), int))
    whole = asking(recipe, "near", **NEAR)
    refuse_policies(whole, open_data(whole))
    with pytest.raises(EvenloadError, match=what) as refused:
        refuse_policies(changed := whole.changed(changes), open_data(changed))
    assert refused.value.do
