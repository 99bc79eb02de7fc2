"""Domains in shares that change: no sample lost or repeated, counts as the shares say, one state whatever comes."""

import json
import math
from itertools import chain

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.recipe.shares import normalised
from evenload.data.samples.mixture import Mixture, seed_of
from evenload.data.samples.order import BatchSize
from hypothesis import given
from hypothesis import strategies as st

from .accounts import Accounts, own_order

NAMES = ("chat", "code", "papers", "web", "wiki")
SIZES = st.lists(st.integers(1, 90), min_size=1, max_size=5)
WEIGHT = st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.5])
HISTORY = st.lists(st.lists(WEIGHT, min_size=5, max_size=5).filter(any), min_size=1, max_size=6)
BATCH = st.one_of(st.integers(1, 24).map(BatchSize), st.integers(1, 700).map(lambda tokens: BatchSize(1, tokens)))


def lengths_of(sizes, names=NAMES):
    """Lengths that follow from the name alone, so that a domain is the same beside any others."""
    return {
        name: np.random.default_rng(len(name) + ord(name[0])).integers(20, 120, 200)[:size]
        for name, size in zip(names, sizes, strict=False)
    }


def mixed(lengths, history, size, *, by_targets, groups=None):
    """A mixture whose shares go through a history and begin it anew."""
    places = [NAMES.index(name) for name in sorted(lengths)]

    def shares(_, step):
        now = [history[step % len(history)][place] for place in places]
        return normalised(now if any(now) else [1.0] * len(now))

    targets = {name: own - 1 for name, own in lengths.items()} if by_targets else None
    return Mixture(lengths, targets, size, shares, groups)


def drawn(mixture, state, steps):
    rows = []
    for _ in range(steps):
        samples, state = mixture.take(state)
        rows.append(mixture.numbers.named(samples))
    return rows, state


@given(sizes=SIZES, history=HISTORY, size=BATCH, by_targets=st.booleans(), steps=st.integers(1, 12))
def test_shares_move_no_order_and_counts_follow_them(sizes, history, size, by_targets, steps):
    lengths = lengths_of(sizes)
    mixture, accounts = mixed(lengths, history, size, by_targets=by_targets), Accounts()
    state, rows = mixture.begin(3), []
    prices = {name: own - 1 if by_targets else np.ones_like(own) for name, own in lengths.items()}
    most = max(int(own.max()) for own in prices.values())
    for step in range(steps):
        (batch,), after = drawn(mixture, state, 1)
        shares = dict(zip(mixture.names, mixture._shares({}, step), strict=True))
        for name, number in batch:
            accounts.draw(name, int(prices[name][number]), shares)
            ahead = accounts.ahead()
            assert max(ahead.values()) < most + 1e-6
            assert by_targets or len(ahead) > 3 or min(ahead.values()) > -1, "up to three domains lag by less than one"
        assert after.credits == pytest.approx([-ahead[one] for one in mixture.names], abs=1e-6)
        rows += batch
        tokens = sum(int(lengths[name][number]) for name, number in batch)
        if size.tokens is None:
            assert len(batch) == size.samples
        else:
            assert tokens - int(lengths[batch[-1][0]][batch[-1][1]]) < size.tokens <= tokens
        state = after
    for name, own in lengths.items():
        numbers = [number for one, number in rows if one == name]
        assert numbers == own_order(name, len(own), len(numbers)), "an epoch after the other, each sample once in each"
        order = state.orders[name]
        assert (order.epoch, order.consumed) == divmod(len(numbers), len(own))


@given(
    sizes=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    here=st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=6),
    history=HISTORY,
    size=BATCH,
    by_targets=st.booleans(),
)
def test_domains_that_come_and_go_lose_and_repeat_nothing(sizes, here, history, size, by_targets):
    every = lengths_of(sizes)
    state = None
    rows = []
    for names in here:
        mixture = mixed({name: every[name] for name in names}, history, size, by_targets=by_targets)
        position = mixture.begin(3) if state is None else mixture.resume(state, 3)
        batches, position = drawn(mixture, position, 3)
        assert {name for batch in batches for name, _ in batch} <= names
        assert math.fsum(position.credits) == pytest.approx(0, abs=1e-6)
        rows += chain(*batches)
        state = json.loads(json.dumps(position.state()))
    for name, own in every.items():
        numbers = [number for one, number in rows if one == name]
        assert numbers == own_order(name, len(own), len(numbers))


@given(sizes=SIZES, history=HISTORY, size=BATCH, by_targets=st.booleans(), stops=st.integers(0, 6))
def test_a_batch_follows_from_the_state_and_the_shares_alone(sizes, history, size, by_targets, stops):
    """Kept as JSON at any step, and whatever the order in which domains are named."""
    lengths = lengths_of(sizes)
    whole, _ = drawn(mixture := mixed(lengths, history, size, by_targets=by_targets), mixture.begin(3), 8)
    turned = dict(reversed(lengths.items()))
    begun, stopped = drawn(other := mixed(turned, history, size, by_targets=by_targets), other.begin(3), stops)
    kept = json.loads(json.dumps(stopped.state()))
    resumed = other.resume(kept, seed=99)  # the seed of a state's orders is the state's
    assert resumed == stopped
    assert begun + drawn(other, resumed, 8 - stops)[0] == whole


@given(
    sizes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=12), min_size=1, max_size=4),
    history=HISTORY,
    size=BATCH,
    by_targets=st.booleans(),
    stop=st.integers(0, 8),
)
def test_groups_stay_whole_and_none_comes_twice_in_its_epoch(sizes, history, size, by_targets, stop):
    groups = {name: np.repeat(np.arange(len(own)), own) for name, own in zip(NAMES, sizes, strict=False)}
    groups = {name: np.random.default_rng(len(own)).permutation(own) for name, own in groups.items()}
    lengths = lengths_of([len(own) for own in groups.values()])
    mixture = mixed(lengths, history, size, by_targets=by_targets, groups=groups)
    prices = {name: own - 1 if by_targets else np.ones_like(own) for name, own in lengths.items()}
    most = max(int(np.bincount(groups[name], own).max()) for name, own in prices.items())
    state, rows, accounts = mixture.begin(3), [], Accounts()
    for step in range(8):
        if step == stop:
            state = mixture.resume(json.loads(json.dumps(state.state())), 3)
        (batch,), state = drawn(mixture, state, 1)
        shares = dict(zip(mixture.names, mixture._shares({}, step), strict=True))
        for name, number in batch:
            accounts.draw(name, int(prices[name][number]), shares)
        assert max(accounts.ahead().values()) < most + 1e-6
        sums = [1 if size.tokens is None else int(lengths[name][number]) for name, number in batch]
        name, number = batch[-1]
        last = np.count_nonzero(groups[name] == groups[name][number])
        assert sum(sums) >= (size.samples if size.tokens is None else size.tokens) > sum(sums[:-last])
        rows += batch
    for name, own in groups.items():
        came = [number for one, number in rows if one == name]
        order = own_order(name, len(set(own.tolist())), 300)
        members = [np.flatnonzero(own == unit).tolist() for unit in order]
        assert came == list(chain(*members))[: len(came)], "an epoch of groups after the other"
        assert len(came) in np.cumsum([0, *map(len, members)]), "whole ones alone"


def test_a_group_costs_as_many_as_it_has_samples():
    """Two domains of one share, one of them in groups of four: 32 samples are 16 of each."""
    groups = {"chat": np.repeat(np.arange(10), 4), "code": np.arange(40)}
    mixture = mixed(lengths_of([40, 40]), [[1.0] * 5], BatchSize(32), by_targets=False, groups=groups)
    ((batch,), _) = drawn(mixture, mixture.begin(3), 1)
    assert 14 <= sum(name == "chat" for name, _ in batch) <= 18


def test_the_seed_of_an_order_is_that_of_the_run_and_of_the_name():
    assert len({seed_of(name, seed) for name in NAMES for seed in range(50)}) == 250


def test_a_small_share_is_drawn_as_often_as_it_says_and_a_share_of_nothing_never():
    lengths = lengths_of([90, 90, 90])
    mixture = mixed(lengths, [[0.5, 0.125, 0.0, 0, 0]], BatchSize(1), by_targets=False)
    rows, _ = drawn(mixture, mixture.begin(3), 50)
    assert [sum(batch[0][0] == name for batch in rows) for name in mixture.names] == [40, 10, 0]
    first = next(step for step, batch in enumerate(rows) if batch[0][0] == "code")
    assert {step % 5 for step, batch in enumerate(rows) if batch[0][0] == "code"} == {first % 5}


def test_a_domain_whose_share_becomes_nothing_is_not_drawn_though_it_is_owed():
    history = [[0.4, 0.3, 0.3, 0, 0], [0.4, 0.3, 0.3, 0, 0], [0.5, 0.5, 0.0, 0, 0], [0.1, 0.1, 0.8, 0, 0]]
    mixture = mixed(lengths_of([90, 90, 90]), history, BatchSize(1), by_targets=False)
    rows, state = drawn(mixture, mixture.begin(3), 3)
    assert [batch[0][0] for batch in rows] == ["chat", "code", "chat"]
    assert state.credits == pytest.approx((-0.7, 0.1, 0.6))
    assert drawn(mixture, state, 1)[0][0][0][0] == "papers", "it is made up for when there is a share again"


def test_steps_are_counted_by_epochs_of_the_slowest_domain_and_by_tokens(monkeypatch):
    lengths = lengths_of([30, 10])
    mixture = mixed(lengths, [[1, 1, 1, 1, 1]], BatchSize(4), by_targets=False)
    assert mixture.steps(3, epochs=2) == 2 * 30 * 2 // 4
    rows, _ = drawn(mixture, mixture.begin(3), 40)
    tokens = np.cumsum([sum(int(lengths[name][number]) for name, number in batch) for batch in rows])
    assert mixture.steps(3, tokens=int(tokens[11])) == 12
    assert mixture.steps(3, tokens=int(tokens[11]) + 1) == 13
    monkeypatch.setattr("evenload.data.samples.mixture._MOST_DRAWN", 5000)
    with pytest.raises(EvenloadError, match="cannot be counted"):
        mixed(lengths, [[1, 1e-9, 1, 1, 1]], BatchSize(4096), by_targets=False).steps(3, epochs=1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"algorithm": "credits-0"}, "none of domains as this version has"),
        ({"algorithm": "feistel-1"}, "none of domains as this version has"),
        ({"step": -1}, "is damaged"),
        ({"here": None}, "is damaged"),
        ({"domains": []}, "is damaged"),
        ({"domains": {"chat": {}, "code": {}}}, "is damaged"),
    ],
)
def test_a_state_of_something_else_is_refused(change, what):
    mixture = mixed(lengths_of([20, 20]), [[1, 1, 1, 1, 1]], BatchSize(4), by_targets=False)
    state = drawn(mixture, mixture.begin(3), 2)[1].state()
    with pytest.raises(EvenloadError, match=what):
        mixture.resume({**state, **change}, 3)


def test_a_domain_of_other_data_is_refused_by_name():
    history = [[1, 1, 1, 1, 1]]
    state = mixed(lengths_of([20, 20]), history, BatchSize(4), by_targets=False).begin(3).state()
    with pytest.raises(EvenloadError, match="the domain code: the data is not the data of the checkpoint"):
        mixed(lengths_of([20, 21]), history, BatchSize(4), by_targets=False).resume(state, 3)
    bad = json.loads(json.dumps(state))
    bad["domains"]["chat"]["credit"] = math.inf
    with pytest.raises(EvenloadError, match="is damaged"):
        mixed(lengths_of([20, 20]), history, BatchSize(4), by_targets=False).resume(bad, 3)
