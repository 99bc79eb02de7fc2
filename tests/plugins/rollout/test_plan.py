"""Laws of dealing: each sample once, alike everywhere, groups apart, never below the bound, spread where all fails."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from evenload import EvenloadError
from evenload.core.errors import PlanError
from evenload.plugins.rollout import (
    H100_7B,
    LengthDistributions,
    Rollout,
    RolloutCosts,
    RolloutPlan,
    RolloutRequest,
    bound_of,
    check_rollout,
    plan_rollout,
    spread,
)
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 512


@st.composite
def requests(draw):
    """Requests of any shape, also of samples that have some tokens."""
    num_prompts = draw(st.integers(1, 12))
    prompts = draw(st.lists(st.integers(0, num_prompts - 1), min_size=1, max_size=80))
    tokens = draw(st.lists(st.integers(1, 60), min_size=num_prompts, max_size=num_prompts))
    done = draw(st.sampled_from([0, 1])) * np.array(
        draw(st.lists(st.integers(0, LIMIT - 1), min_size=len(prompts), max_size=len(prompts)))
    )
    return RolloutRequest(
        np.array(prompts), np.array(tokens), draw(st.integers(1, 9)), LIMIT, draw(st.integers(1, 6)), 2000, done
    )


def known(request, seed=0):
    random = np.random.default_rng(seed)
    count = len(request.prompt_tokens)
    return LengthDistributions(4 + random.normal(size=count), 0.2 + random.random(count), LIMIT)


@given(requests(), st.sampled_from(["all", "each"]))
def test_each_sample_is_on_one_rank_once_and_groups_are_apart(request, waits_for):
    plan = plan_rollout(request, known(request), waits_for=waits_for)
    assert plan.planner == "tie"
    assert len(plan.ranks) == request.num_ranks
    assert sorted(np.concatenate(plan.ranks).tolist()) == list(range(len(request.prompts)))
    sizes = np.bincount(request.prompts)
    for own in plan.ranks:
        assert (np.bincount(request.prompts[own], minlength=len(sizes)) <= -(-sizes // request.num_ranks)).all()


@given(requests())
def test_every_rank_makes_the_same_plan(request):
    lists = {"prompts": request.prompts.tolist(), "done": request.done.tolist()}
    again = replace(request, **lists, prompt_tokens=request.prompt_tokens.astype(np.int32))
    plan = plan_rollout(request, known(request))
    assert plan.digest == plan_rollout(again, known(request)).digest
    assert len(plan.digest) == 16
    swapped = RolloutPlan((plan.ranks[0][::-1], *plan.ranks[1:]), plan.planner)
    assert (swapped.digest == plan.digest) == (len(plan.ranks[0]) < 2)


@given(requests(), st.integers(0, 100))
def test_no_rollout_ends_before_its_bound(request, seed):
    request = replace(request, done=np.zeros(len(request.prompts), int))
    lengths = np.random.default_rng(seed).integers(1, LIMIT + 1, len(request.prompts))
    costs = H100_7B._replace(prompt_s=1e-4)
    bound = bound_of(request, lengths, costs)
    for plan in (spread(request), plan_rollout(request, known(request))):
        assert Rollout(request, lengths, costs).play(plan).rank_s.max() >= bound.bound_s * (1 - 1e-9)


@pytest.mark.parametrize(("count", "which"), [(1, "longest_s"), (8, "shared_s")])
def test_one_sample_and_full_slots_of_equal_ones_reach_their_bounds(count, which):
    request = RolloutRequest(np.zeros(count, int), np.array([20]), 2, LIMIT, 4, 1 << 20)
    lengths = np.full(count, 100)
    bound = bound_of(request, lengths, H100_7B)
    assert bound.bound_s == getattr(bound, which)
    assert Rollout(request, lengths, H100_7B).play(spread(request)).rank_s.max() == pytest.approx(bound.bound_s)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_bound_is_what_its_equations_give_token_by_token(num_ranks):
    """Of three prompts the first has four samples, whose keys are computed once, and the last one none."""
    prompts, prompt_tokens, lengths = np.array([0, 0, 0, 1, 0]), np.array([900, 40, 5000]), np.array([3, 40, 7, 90, 12])
    costs = RolloutCosts(step_s=5e-3, row_s=2e-4, key_s=3e-6, prompt_s=1e-4)
    request = RolloutRequest(prompts, prompt_tokens, num_ranks, LIMIT, 4, 1 << 20)
    # [samples][tokens] seconds of a token beside its step: the k-th reads the keys of the prompt and of k before it.
    of_tokens = [
        [costs.row_s + costs.key_s * (prompt_tokens[p] + k) for k in range(n)]
        for p, n in zip(prompts, lengths, strict=True)
    ]
    work_s = sum(map(sum, of_tokens)) + costs.prompt_s * (900 + 40)
    alone_s = [
        sum(own) + costs.prompt_s * prompt_tokens[p] + costs.step_s * len(own)
        for p, own in zip(prompts, of_tokens, strict=True)
    ]
    bound = bound_of(request, lengths, costs)
    assert bound.longest_s == pytest.approx(max(alone_s), rel=1e-12)
    assert bound.shared_s == pytest.approx((work_s + costs.step_s * lengths.sum() / 4) / num_ranks, rel=1e-12)
    low, high = costs.step_s * lengths.max(), 100.0
    for _ in range(80):
        middle = (low + high) / 2
        rows = [np.array(own) for own in of_tokens]
        crowd_s = sum(costs.step_s * np.sqrt(own).sum() ** 2 / (middle - costs.step_s * len(own)) for own in rows)
        low, high = (middle, high) if num_ranks * middle < work_s + crowd_s else (low, middle)
    # The code takes an integral for the sum of square roots, which is less.
    assert 0.99 * low < bound.crowded_s <= low


def test_long_prompts_are_dealt_apart_and_begin_first_where_all_are_waited_for():
    request = RolloutRequest(np.repeat(np.arange(8), 2), np.full(8, 10), 2, 4096, 2, 1 << 20)
    medians = [100.0, 2000.0, *[100.0] * 6]
    distributions = LengthDistributions(np.log(medians), np.full(8, 0.05), 4096)
    first, second = plan_rollout(request, distributions).ranks
    assert {int(first[0]), int(second[0])} == {2, 3}
    last = plan_rollout(request, distributions, waits_for="each").ranks
    assert {int(own[-1]) for own in last} == {2, 3}


def test_the_order_is_one_that_ends_early_for_what_is_known():
    """Largest first where prompts say how long their samples are; not always where they do not."""
    prompts = np.repeat(np.arange(64), 8)
    random = np.random.default_rng(0)
    mu = np.log(300) + 0.8 * random.normal(size=64)
    for sigma in (0.05, 0.8):
        distributions = LengthDistributions(mu, np.full(64, sigma), 4096)
        request = RolloutRequest(prompts, np.full(64, 10), 8, 4096, 8, 1 << 20)
        least = plan_rollout(request, distributions, waits_for="each")
        chosen = plan_rollout(request, distributions)
        ends = []
        for seed in range(8):
            lengths = np.exp(mu[prompts] + sigma * np.random.default_rng(seed).standard_t(3.5, size=512))
            rollout = Rollout(request, np.clip(lengths, 1, 4096).astype(np.int64), H100_7B)
            ends.append([rollout.play(plan).rank_s.max() for plan in (chosen, least)])
        chosen_s, least_s = np.mean(ends, axis=0)
        assert chosen_s <= least_s * (1.02 if sigma > 0.5 else 0.95)


def test_what_fails_is_spread_and_said(caplog):
    request = RolloutRequest(np.array([0, 0, 1]), np.array([5, 5]), 2, LIMIT, 2, 1000)
    with caplog.at_level(logging.WARNING, "evenload"):
        plan = plan_rollout(request, LengthDistributions(np.zeros(3), np.ones(3), LIMIT))
    assert plan.planner == "spread"
    assert [own.tolist() for own in plan.ranks] == [[0, 2], [1]]
    assert "spread over ranks" in caplog.text


def test_a_plan_that_loses_a_sample_is_refused():
    request = RolloutRequest(np.array([0, 0, 1]), np.array([5, 5]), 2, LIMIT, 2, 1000)
    for ranks in (((0, 1), (1,)), ((0, 1), ()), ((0, 1, 2),)):
        with pytest.raises(PlanError, match="loses or repeats"):
            check_rollout(RolloutPlan(tuple(np.array(own, np.int64) for own in ranks), "odd"), request)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompts": []}, "no sample"),
        ({"num_ranks": 0}, "below 1"),
        ({"slots": 0}, "below 1"),
        ({"prompts": [0, 2]}, "of no prompt"),
        ({"prompt_tokens": [0, 5]}, "has no token"),
        ({"cap_tokens": LIMIT + 4}, "no room for the keys of one sample"),
        ({"done": [0, LIMIT]}, "already"),
        ({"done": [1]}, "already"),
    ],
)
def test_a_request_that_no_rank_can_run_is_refused(more, message):
    plain = {"prompts": [0, 1], "prompt_tokens": [5, 5], "num_ranks": 2, "limit": LIMIT, "slots": 2, "cap_tokens": 600}
    with pytest.raises(EvenloadError, match=message):
        RolloutRequest(**{**plain, **more})


def test_distributions_are_finite():
    for mu, sigma in (([np.nan], [1.0]), ([0.0], [0.0]), ([0.0, 1.0], [1.0])):
        with pytest.raises(EvenloadError, match="not distributions"):
            LengthDistributions(np.array(mu), np.array(sigma), 10)
