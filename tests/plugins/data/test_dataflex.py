"""DataFlex's faults in selectors, weighters and draws are not ours; for those of its mixers: test_simulated_runs."""

import builtins
import json

import numpy as np
import pytest
import torch
from evenload.api import load_plugins
from evenload.core.planning.planner import Draw
from evenload.core.policies import Pool, SeenSamples, chosen_policy, started, stepped
from evenload.core.registry import data_policies
from evenload.runtime.adapters.projection import projection

load_plugins()
SELECTS, WEIGHTS = sorted(data_policies("select")), sorted(data_policies("weight"))
SETTINGS = {
    "cluster_less": {"cluster_size": 20, "representatives": 3},
    "delta_loss": {"updates": 6},
    "objective": {"wanted": [1.0, 3.0]},
}
UPDATES = 6


def pool(update, run=0):
    rng, fixed = np.random.default_rng([run, update]), np.random.default_rng([run, 99])
    numbers, start = fixed.permutation(600)[:60], fixed.lognormal(0, 1, 60)
    queries = {"query_gradients": rng.normal(size=(5, 4)), "queries": fixed.normal(size=(3, 2))}
    embeddings, gradients = fixed.normal(size=(60, 2)), rng.normal(size=(60, 4))
    losses = start * rng.uniform(0.5, 1.1, 60) ** update
    own = {"losses": losses, "embeddings": embeddings, "gradients": gradients, **queries}
    return Pool(numbers, 12, seed=5, update=update, **own)


def samples(update, run=0):
    rng = np.random.default_rng([run, update, 7])
    targets = rng.integers(1, 90, 24)
    columns = {"column": rng.uniform(0, 2, 24), "domains": rng.integers(0, 2, 24), "shares": np.array([0.3, 0.7])}
    columns |= {"vectors": rng.normal(size=(24, 3)), "anchors": rng.normal(size=(4, 3)) if update == 1 else None}
    return SeenSamples(rng.lognormal(0, 0.5, 24) * targets, targets, **columns)


def answers(kind, name, *, run=0, kill_at=None, forgets=False):
    """What a policy answers at each update, where its state is JSON from a checkpoint at one of them, or is lost."""
    policy = chosen_policy(kind, name, SETTINGS.get(name, {}), data_policies(kind))
    known = pool if kind == "select" else samples
    state, last = started(policy, known(0, run))
    out = [last.tolist()]
    for update in range(1, UPDATES):
        seen = known(update, run)
        if update == kill_at:
            state, last = json.loads(json.dumps(state)), np.array(json.loads(json.dumps(last.tolist())))
        if update == kill_at and forgets:
            state, last = started(policy, seen)
        if "representatives" in state:
            seen = seen._replace(gradients=seen.gradients[: len(state["representatives"])])
        state, last = stepped(policy, state, seen, last)
        out.append(last.tolist())
    return out


@pytest.mark.parametrize(("kind", "name"), [*(("select", n) for n in SELECTS), *(("weight", n) for n in WEIGHTS)])
def test_a_killed_run_goes_on_as_it_would_have(kind, name, caplog):
    """No state of a selector or a weighter is in DataFlex's checkpoints."""
    whole = answers(kind, name)
    follows = name != "near"  # the same of the same embeddings in every update
    assert (len({json.dumps(answer) for answer in whole}) > 1) == follows, "it follows what is seen"
    assert all(answers(kind, name, kill_at=kill) == whole for kill in range(1, UPDATES))
    assert not caplog.records
    if name in ("delta_loss", "adapt"):
        assert answers(kind, name, kill_at=3, forgets=True) != whole, "without its state it would not"


def test_weights_are_those_of_the_global_batch_and_a_token_of_a_short_sample_counts_no_more():
    """DataFlex normalises over a micro-batch of all ranks, and weighs means of samples."""
    policy, whole = chosen_policy("weight", "loss", {}, data_policies("weight")), samples(1)
    state, last = started(policy, whole)
    _, weights = stepped(policy, state, whole, last)
    halves = [SeenSamples(whole.losses[part], whole.targets[part]) for part in (slice(12), slice(12, 24))]
    apart = [stepped(policy, state, half, last[:12])[1] / 2 for half in halves]
    assert np.abs(np.concatenate(apart) / weights - 1).max() > 0.01, "weights of two micro-batches would be others"
    lengths = whole.targets + 1
    alike = Draw(np.arange(24), lengths, {}, weight=np.full(24, 0.125))
    of_token = 0.125 / alike.weight_sums.sum()  # in L = sum_s w_s sum_t l / sum_s w_s n_s
    assert of_token == 1 / whole.targets.sum(), "one number, whatever the length of its sample"


def test_gradients_are_projected_in_float64():
    """DataFlex holds them in float16, whose largest number is 65,504 and whose least is 6e-8."""
    gradient, places = torch.from_numpy(np.random.default_rng(3).normal(size=300)), torch.arange(300)
    whole = projection("w", gradient, places, 16)
    for scale in (2.0**40, 2.0**-40):
        assert torch.equal(projection("w", gradient * scale, places, 16), whole * scale)


@pytest.mark.parametrize(("kind", "name"), [*(("select", n) for n in SELECTS), *(("weight", n) for n in WEIGHTS)])
def test_nothing_of_another_run_is_used(kind, name, monkeypatch):
    """DataFlex reuses step_N.json of an older run without a word."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"a file: {args}")

    alone = answers(kind, name, run=1)
    monkeypatch.setattr(builtins, "open", refuse)
    answers(kind, name, run=0)
    assert answers(kind, name, run=1) == alone
