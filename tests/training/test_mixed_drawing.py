"""Batches of domains with samples that wait: each keeps its domain and its weight, here or away."""

import json
from collections import Counter

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.planning.chain import PlanChain
from evenload.core.recipe.recipe import parse
from evenload.training.drawing import Domains, Drawing, batch_size, num_waiting

CAP = 2048
DOMAINS = {
    "code": {"source": "x", "share": 2, "weight": 0.5},
    "papers": {"source": "y", "share": 1},
    "web": {"source": "z", "share": 1, "weight": 2.0},
}
WEIGHTS = {"code": 0.5, "papers": 1.0, "web": 2.0}


def recipe_of(names, delay=3, ranks=4, **mix):
    packing = {"enabled": True, "max_tokens": CAP, "max_delay_steps": delay}
    data = {"domains": {name: DOMAINS[name] for name in names.split()}, "mix": mix}
    parallel, train = {"dp": ranks}, {"global_batch_size": 8}
    return parse({"data": data, "parallel": parallel, "train": train, "plugins": {"packing": packing}})


def lengths_of(name):
    seed, count = {"code": (1, 90), "papers": (2, 50), "web": (3, 70)}[name]
    return np.clip(np.random.default_rng(seed).lognormal(4, 1.3, count), 2, CAP).astype(np.int64)


def drawing(recipe, state=None):
    assert recipe.data.domains is not None
    lengths = {name: lengths_of(name) for name in recipe.data.domains}
    domains = Domains.of_lengths(recipe, lengths, {name: own - 1 for name, own in lengths.items()})
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    whole = np.concatenate([lengths[name] for name in sorted(lengths)])
    return Drawing(state, whole, batch_size(recipe), chain, seed=3, domains=domains)


def named(one, draw):
    return [(name, number) for name, number in one._domains.mixture.numbers.named(draw.samples)]


def waiting(draw):
    return [tuple(pair) for pair in draw.state.get("waiting", {"samples": []})["samples"]]


def test_what_waits_keeps_its_domain_and_its_weight():
    one, waited = drawing(recipe_of("code papers web")), 0
    for _ in range(40):
        draw = one()
        names = sorted(DOMAINS)
        assert draw.domain is not None
        assert isinstance(draw.weight, np.ndarray)
        assert [name for name, _ in named(one, draw)] == [names[place] for place in draw.domain]
        assert draw.weight.tolist() == [WEIGHTS[names[place]] for place in draw.domain]
        waited += num_waiting(draw.state)
    assert waited > 10, "or nothing was seen to wait"


@pytest.mark.parametrize("unit", ["samples", "targets"])
def test_a_state_goes_on_bit_for_bit_with_what_waits_on_any_number_of_ranks(unit):
    whole, stopped = drawing(recipe_of("code papers web", unit=unit)), drawing(recipe_of("web code papers", unit=unit))
    for step in range(30):
        draw, other = whole(), stopped()
        assert draw.samples.tolist() == other.samples.tolist()
        assert draw.state == other.state
        if step % 3 == 2:
            recipe = recipe_of("papers web code", unit=unit, ranks=1 + step % 4)
            stopped = drawing(recipe, json.loads(json.dumps(other.state)))
            assert stopped.num_ranks == 4, "the rule goes on as for the ranks that the run began with"


def test_what_waits_of_a_domain_that_leaves_runs_when_it_is_back():
    runs = Counter()
    one, state = drawing(recipe_of("code papers web")), None

    def run(steps):
        for _ in range(steps):
            draw = one()
            runs.update(named(one, draw))
        return draw

    last = run(2)
    while not any(name == "web" for name, _ in waiting(last)):
        last = run(1)
    left = [pair for pair in waiting(last) if pair[0] == "web"]
    state = json.loads(json.dumps(last.state))
    one = drawing(recipe_of("code papers"), state)
    last, before = run(6), {pair: runs[pair] for pair in left}
    assert [pair for pair in waiting(last) if pair[0] == "web"] == left
    assert {pair: runs[pair] for pair in left} == before, "nothing of it ran while it was away"
    one = drawing(recipe_of("code papers web"), json.loads(json.dumps(last.state)))
    last = run(4)
    assert all(runs[pair] == before[pair] + 1 for pair in left)
    assert one._domains is not None
    drawn = Counter(dict(runs)) + Counter(waiting(last))
    for name, kept in last.state["domains"].items():
        taken = kept["epoch"] * kept["num_samples"] + kept["consumed"]
        assert sum(count for (own, _), count in drawn.items() if own == name) == taken, "none lost, none repeated"


@pytest.mark.parametrize("rows", [[["web", 10**6]], [["code"]], [3], [["code", -1]]])
def test_a_damaged_queue_is_refused(rows):
    state = {**drawing(recipe_of("code web"))().state, "waiting": {"samples": rows, "steps": [1], "ranks": 4}}
    with pytest.raises(EvenloadError, match="queue of waiting samples is damaged"):
        drawing(recipe_of("code web"), state)
