"""A mixture as a sampler: what all ranks draw together depends on shares alone, wherever a loop stops and goes on."""

import json
import math
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from evenload import EvenloadError, MixtureSampler
from evenload.core.policies import normalised
from evenload.data.samples.mixture import Mixture
from evenload.data.samples.order import BatchSize
from evenload.data.samples.sampler import MOST_AHEAD
from hypothesis import given
from hypothesis import strategies as st

from .accounts import Accounts, own_order

SIZES = {"web": 50, "code": 20, "chat": 7}
FIRSTS = {"web": 0, "code": 50, "chat": 70}
SHARES = {"web": 1.0, "code": 3.0, "chat": 0.5}
BATCH = 24
SHARE = st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.5])
CHANGES = st.dictionaries(
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(sorted(SIZES)), SHARE, min_size=3).filter(lambda shares: any(shares.values())),
    max_size=3,
)
RANKS = st.sampled_from([(1, None), (1, 8), (2, 3), (2, None), (3, 4), (4, 2), (4, None), (8, 1)])


def sampler(rank=0, num_ranks=1, micro=None, **more):
    return MixtureSampler(SIZES, SHARES, BATCH, micro, rank, num_ranks, seed=3, **more)


def steps_of(samplers, count, ahead=0):
    """What all ranks draw in each of so many steps, sorted; loaders draw some steps further."""
    ranks, steps = [], []
    for one in samplers:
        of_step = BATCH // one.num_ranks
        drawn = list(islice(one, (count + ahead) * of_step // (one.micro_batch_size or 1)))
        if one.micro_batch_size:
            assert {len(part) for part in drawn} <= {one.micro_batch_size}
            drawn = list(chain(*drawn))
        ranks.append([drawn[first : first + of_step] for first in range(0, count * of_step, of_step)])
    for of_ranks in zip(*ranks, strict=True):
        steps.append(sorted(chain(*of_ranks)))
    return steps


def ranks_of(count, micro, changes):
    samplers = [sampler(rank, count, micro) for rank in range(count)]
    for one in samplers:
        for step, shares in sorted(changes.items()):
            one.set_shares(shares, step)
    return samplers


@given(changes=CHANGES, stops=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), RANKS), max_size=4))
def test_a_loop_that_is_killed_goes_on_with_the_same_samples_on_any_ranks(changes, stops):
    """Each stop: steps that are trained, steps that loaders are ahead by then, and who goes on."""
    whole = steps_of(ranks_of(1, None, changes), 20)
    samplers, steps, state = ranks_of(2, None, changes), [], {}
    for trained, ahead, (count, micro) in [*stops, (20, 0, (1, None))]:
        trained = min(trained, 20 - len(steps))
        steps += steps_of(samplers, trained, ahead)
        states = [json.loads(json.dumps(one.state_dict(len(steps)))) for one in samplers]
        assert all(one == states[0] for one in states), "one state, whatever the rank"
        state, samplers = states[0], [sampler(rank, count, micro) for rank in range(count)]
        for one in samplers:
            one.load_state_dict(state)
            assert one.state_dict() == state
    assert steps == whole


@given(changes=CHANGES, by_targets=st.booleans())
def test_no_sample_comes_twice_in_its_epoch_and_counts_follow_the_shares(changes, by_targets):
    targets = {name: list(1 + np.arange(size) % 5) for name, size in SIZES.items()} if by_targets else None
    one = sampler(steps=12, targets=targets)
    for step, shares in sorted(changes.items()):
        one.set_shares(shares, step)
    drawn = list(one)
    assert len(drawn) == 12 * BATCH == len(one)
    names = one.names_of(drawn)
    accounts = Accounts()
    for place, (number, name) in enumerate(zip(drawn, names, strict=True)):
        shares = [changes[step] for step in sorted(changes) if step <= place // BATCH]
        now = dict(zip(sorted(SIZES), normalised([(shares or [SHARES])[-1][n] for n in sorted(SIZES)]), strict=True))
        accounts.draw(name, targets[name][number - FIRSTS[name]] if targets else 1, now)
        for other, ahead in accounts.ahead().items():
            assert ahead < (max(targets[other]) if targets else 1) + 1e-6
            assert targets or ahead > -1 - 1e-9
    for name, size in SIZES.items():
        own = [number - FIRSTS[name] for number, of in zip(drawn, names, strict=True) if of == name]
        assert own == own_order(name, size, len(own))


def run_of_evenload():
    lengths = {name: np.full(size, 9) for name, size in SIZES.items()}
    return Mixture(lengths, None, BatchSize(BATCH), lambda _, __: normalised([SHARES[n] for n in sorted(SIZES)]))


def test_it_draws_what_a_run_of_evenload_draws():
    mixture, one = run_of_evenload(), sampler()
    numbers, _ = mixture.take(mixture.begin(3))
    drawn = list(islice(one, BATCH))
    named = [[name, number - FIRSTS[name]] for name, number in zip(one.names_of(drawn), drawn, strict=True)]
    assert named == mixture.numbers.named(numbers)


def test_shares_hold_from_their_step_on_and_a_domain_that_is_left_out_keeps_its_own():
    one = sampler(steps=4)
    one.set_shares({"web": 0.0}, 1)
    one.set_shares({"code": 0.0}, 3)
    names = one.names_of(list(one))
    drawn = [Counter(names[first : first + BATCH]) for first in range(0, 4 * BATCH, BATCH)]
    assert all(drawn[0].values())
    assert drawn[1]["web"] == drawn[2]["web"] == drawn[3]["web"] == 0
    assert drawn[2]["code"] > drawn[2]["chat"] > 0
    assert drawn[3] == {"chat": BATCH}
    with pytest.raises(EvenloadError, match="the step is drawn already"):
        one.set_shares({"code": 1.0}, 3)
    one.set_shares({"code": 1.0})
    assert one.state_dict()["policy"]["points"] == [[4, {"web": 0.0, "code": 1.0, "chat": 0.5}]]


def test_domains_come_and_go_and_the_others_go_on():
    one = sampler()
    one.set_shares({"code": 9.0}, 2)
    drawn = list(islice(one, 3 * BATCH))
    state = one.state_dict(3)
    sizes, shares = {"new": 5, "web": 50, "code": 20}, {"new": 1.0, "web": 1.0, "code": 1.0}
    other = MixtureSampler(sizes, shares, BATCH, seed=8)
    other.load_state_dict(state)
    more = list(islice(other, BATCH))
    assert Counter(other.names_of(more)) == {"new": 8, "web": 8, "code": 8}, "shares are those of now"
    kept = other.state_dict(4)
    assert kept["domains"]["chat"] == state["domains"]["chat"], "it waits as it was left"
    code = [number - 50 for number in drawn if 50 <= number < 70] + [number - 55 for number in more if number >= 55]
    assert max(Counter(code).values()) - min(Counter(code).values(), default=0) <= 1
    assert code == own_order("code", 20, len(code))


def test_a_state_of_a_run_of_evenload_goes_on_by_the_shares_that_are_given():
    mixture = run_of_evenload()
    _, after = mixture.take(mixture.begin(3))
    one, whole = sampler(), sampler()
    one.load_state_dict(after.state())
    assert list(islice(one, BATCH)) == list(islice(whole, 2 * BATCH))[BATCH:]


def test_a_state_is_that_of_steps_that_are_drawn_and_not_long_ago():
    one = MixtureSampler({"a": 3}, {"a": 1}, 1)
    list(islice(one, MOST_AHEAD + 5))
    assert one.state_dict(5)["step"] == 5
    for step in (4, MOST_AHEAD + 6):
        with pytest.raises(EvenloadError, match=f"steps 5 to {MOST_AHEAD + 5}"):
            one.state_dict(step)


def test_len_is_what_is_left_and_nothing_without_an_end():
    one = sampler(rank=1, num_ranks=2, micro=4, steps=5)
    assert len(one) == 5 * 3
    batches = iter(one)
    next(batches)
    assert len(one) == 5 * 3, "of the iteration"
    assert 1 + len(list(batches)) == 5 * 3
    other = sampler(num_ranks=2, micro=4, steps=5)
    other.load_state_dict(one.state_dict(4))
    assert (len(other), len(list(other)), list(other)) == (3, 3, [])
    with pytest.raises(TypeError):
        len(sampler())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"samples": {}}, "no domain to draw from"),
        ({"samples": {"a": 0}, "shares": {"a": 1}}, "samples of a"),
        ({"samples": {"a": 2.5}, "shares": {"a": 1}}, "samples of a"),
        ({"shares": {**SHARES, "wbe": 1}}, "did you mean 'web'"),
        ({"shares": {"web": 1}}, "a domain has no share"),
        ({"shares": {**SHARES, "web": math.nan}}, "not a number from 0 up"),
        ({"shares": {**SHARES, "web": -1}}, "not a number from 0 up"),
        ({"shares": {**SHARES, "web": "1"}}, "not a number from 0 up"),
        ({"shares": dict.fromkeys(SHARES, 0)}, "nothing would be drawn"),
        ({"global_batch_size": 25, "num_ranks": 2}, "not divided evenly"),
        ({"micro_batch_size": 7}, "multiple of 7"),
        ({"rank": 1}, "no such rank"),
        ({"steps": 0}, "steps is not an integer"),
        ({"targets": {"web": [1]}}, "targets are not one a sample"),
        ({"targets": {name: [0] * size for name, size in SIZES.items()}}, "has no target"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, what):
    with pytest.raises(EvenloadError, match=what):
        MixtureSampler(**{"samples": SIZES, "shares": SHARES, "global_batch_size": BATCH, **change})


@pytest.mark.parametrize("points", [3, [[0]], [["x", SHARES]], [[0, {"web": 1}]], [[0, 5]], [[0, {**SHARES, "x": 1}]]])
def test_damaged_shares_of_a_state_are_refused(points):
    state = {**sampler().state_dict(), "policy": {"points": points}}
    with pytest.raises(EvenloadError, match="saved shares of the sampler are damaged"):
        sampler().load_state_dict(state)
    with pytest.raises(EvenloadError, match="the domain code: the data is not the data of the checkpoint"):
        MixtureSampler({**SIZES, "code": 21}, SHARES, BATCH).load_state_dict(sampler().state_dict())
