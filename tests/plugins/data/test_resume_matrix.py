"""Killed behind any step and gone on with on any layout: draws, shares and states of policies to the last bit.

Losses are made up: a function of the sample and the step, as if hosts computed alike. What hosts give differs by
rounding from layout to layout, so the shares of runs agree to 1e-9 instead (`test_learned_shares`).
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Planner
from evenload.core.recipe.recipe import parse
from evenload.integrations.host.scoring import Scores
from evenload.plugins.data.hooks import AdaptiveMixture
from evenload.training.drawing import Domains, Drawing, batch_size
from evenload.training.step_hooks import StepHooks, TrainedStep

CAP, STEPS = 1024, 12
SIZES = {"code": 60, "never": 5, "papers": 23, "web": 41}
LAYOUTS = {
    "4 ranks": {"dp": 4},
    "2 ranks": {"dp": 2},
    "1 rank": {"dp": 1},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
    "pp 4": {"pp": 4},
    "tp 4": {"tp": 4},
}
POLICIES = {
    "odm": {"policy": "odm", "settings": {"scale": 4.0, "smoothing": 0.5}},
    "odm, every second step": {"policy": "odm", "settings": {"scale": 4.0}, "every": 2},
    "ado": {"policy": "ado", "settings": {"skip_steps": 1, "warmup_steps": 4, "every": 2, "smoothing": 0.5}},
}


def recipe_of(layout, mix, unit):
    weights = {"papers": 0.5}
    domains = {
        name: {"source": name, "share": int(name != "never") * (1 + place), "weight": weights.get(name, 1.0)}
        for place, name in enumerate(SIZES)
    }
    packing = {"enabled": True, "max_tokens": CAP, "max_delay_steps": 2}
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    plugins = {"packing": packing, "data": {"enabled": True, "mix": mix}}
    data = {"domains": domains, "mix": {"unit": unit}}
    train = {"global_batch_size": 12}
    return parse({"model": model, "data": data, "parallel": LAYOUTS[layout], "train": train, "plugins": plugins})


def lengths_of(name):
    rng = np.random.default_rng(len(name))
    return np.clip(rng.lognormal(3 + len(name) % 3, 1.0, SIZES[name]), 2, CAP).astype(np.int64)


def shown(draw, step):
    """What a step comes to: the loss of a token falls by steps, unlike in each domain, and differs by sample."""
    assert draw.domain is not None
    means = 1 + (draw.samples % 7) / 10 + 3.0 / (1 + step) ** (0.2 * (1 + draw.domain))
    weights = draw.weight_sums
    return Scores(means * (draw.num_targets if weights is None else weights), draw.num_targets, weights)


def ran(recipe, saved, first, stop=STEPS):
    """What each step draws, and what a checkpoint behind it holds, as `train` draws, plans and keeps."""
    assert recipe.data.domains is not None
    lengths = {name: lengths_of(name) for name in recipe.data.domains}
    domains = Domains.of_lengths(recipe, lengths, {name: own - 1 for name, own in lengths.items()})
    whole = np.concatenate([lengths[name] for name in sorted(lengths)])
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    order = saved["order"] if saved else None
    drawing = Drawing(order, whole, batch_size(recipe), chain, seed=3, domains=domains)
    job = SimpleNamespace(recipe=recipe, domains=domains, source=SimpleNamespace(lengths=whole))
    shares = StepHooks([AdaptiveMixture(job, recipe.data_policy("mix"), drawing)])
    if saved:
        shares.restore(saved)
    planner = Planner(chain, drawing, budget_s=60.0)
    rows = []
    for step in range(first, stop):
        planned = planner.next()
        result = SimpleNamespace(scores=shown(planned.draw, step))
        shares.after(planner, TrainedStep(step, planned, SimpleNamespace(result=result), None))
        state = json.loads(json.dumps({"order": planned.draw.state, **shares.state(planner)}))
        weight = np.broadcast_to(planned.draw.weight, len(planned.draw.samples)).tolist()
        rows.append({"samples": planned.draw.samples.tolist(), "weight": weight, "state": state})
    planner.next()  # let what is begun come to its end
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "unit"), [("odm", "samples"), ("ado", "targets"), ("odm, every second step", "targets")]
)
def test_draws_shares_and_states_are_the_same_to_the_last_bit(policy, unit):
    whole = ran(recipe_of("4 ranks", POLICIES[policy], unit), None, 0)
    records = [row["state"]["order"]["policy"]["shares"] for row in whole]
    assert len({tuple(shares) for shares in records}) > 2, "shares follow what is seen"
    assert any(row["state"]["order"]["waiting"]["samples"] for row in whole), "samples wait over kills"
    assert all(shares[1] == 0 for shares in records), "nothing of it was asked for"
    layouts = list(LAYOUTS)[1:]
    for kill in range(1, STEPS):
        layout, stop = layouts[kill % len(layouts)], min(STEPS, kill + 2)
        again = ran(recipe_of(layout, POLICIES[policy], unit), whole[kill - 1]["state"], kill, stop)
        assert again == whole[kill:stop], f"killed behind step {kill}, gone on with on {layout}"
    state = None
    for first, stop, layout in ((0, 4, "4 ranks"), (4, 6, "2 ranks"), (6, 8, "1 rank"), (8, STEPS, "tp 2 x pp 2")):
        rows = ran(recipe_of(layout, POLICIES[policy], unit), state, first, stop)
        assert rows == whole[first:stop], f"a chain of kills, at {layout}"
        state = rows[-1]["state"]


def test_a_state_that_is_not_kept_is_noticed():
    """What DataFlex does: the policy begins anew."""
    recipe = recipe_of("4 ranks", POLICIES["odm"], "samples")
    whole = ran(recipe, None, 0)
    forgotten = {**whole[4]["state"], "mix": {}}
    assert ran(recipe, forgotten, 5) != whole[5:]
