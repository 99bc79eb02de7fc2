"""Costs that follow measured steps: what the data show is found, the rest stays, oddities count for nothing."""

import json

import numpy as np
import pytest
from evenload.core.costs import refit
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.simulate.predict import pass_seconds, predict

TRUTH = Costs(
    source="planted",
    forward=PassCost(launch_s=1e-4, token_s=2e-6, pair_s=2e-9),
    backward=PassCost(launch_s=2e-4, token_s=4e-6, pair_s=5e-9),
)


def off(costs, launch=1.0, token=1.0, pair=1.0):
    values = refit.coefficients(costs) * [*(launch, token, pair) * 2, 1.0]
    return refit.with_coefficients(costs, values)


def plan_of(lengths, places, num_ranks=2, per=3):
    """``per`` whole sequences a micro-batch, each on its rank."""
    micro_batches = [
        MicroBatch(tuple(Slice(i, 0, lengths[i]) for i in range(k * per, min(len(lengths), k * per + per))), (rank,))
        for k, rank in enumerate(places)
    ]
    return check(StepPlan(as_lengths(lengths), tuple(micro_batches), Limits(num_ranks, 1 << 30)))


def measured(plan, costs):
    """Seconds of each rank forward and backward, as the cost model has them."""
    forward, backward = pass_seconds(plan, costs)
    ranks = range(plan.limits.num_ranks)
    return (
        np.array([sum(forward[i] for i in plan.of_rank(r)) for r in ranks]),
        np.array([sum(backward[j] for j in plan.of_rank(r, "B")) for r in ranks]),
    )


def learned(prior, steps=16, odd=-1, slow=10.0, noise=0.0):
    """Costs after some steps of random batches; one of them ``slow`` times slower, if asked."""
    window, draw = refit.Window(prior), np.random.default_rng(1)
    for step in range(steps):
        lengths = np.clip(draw.lognormal(6.5, 1.2, 12), 16, 20_000).astype(int).tolist()
        plan = plan_of(lengths, [0, 1, 1, 0])
        forward_s, backward_s = measured(plan, TRUTH)
        shake = (slow if step == odd else 1.0) * (1 + noise * draw.standard_normal((2, 2)))
        window.add(refit.rows_of(plan, False), forward_s * shake[0], backward_s * shake[1], 0.01)
    return refit.with_coefficients(prior, window.coefficients())


@pytest.mark.parametrize("machine", [1.0, 300.0])
def test_a_ratio_three_times_off_is_found_whatever_the_machine(machine):
    prior = off(TRUTH, launch=machine, token=machine, pair=3 * machine)
    found = learned(prior)
    for mine, truth in ((found.forward, TRUTH.forward), (found.backward, TRUTH.backward)):
        assert mine.token_s == pytest.approx(truth.token_s, rel=0.04)
        assert mine.pair_s == pytest.approx(truth.pair_s, rel=0.04)
    assert found.update_s == pytest.approx(0.01)


@pytest.mark.parametrize(("odd", "noise"), [(7, 0.0), (-1, 0.03), (2, 0.03)])
def test_a_disturbed_step_and_noise_do_little(odd, noise):
    found = learned(off(TRUTH, pair=3.0), odd=odd, noise=noise)
    for mine, truth in ((found.forward, TRUTH.forward), (found.backward, TRUTH.backward)):
        assert mine.token_s == pytest.approx(truth.token_s, rel=0.12)
        assert mine.pair_s == pytest.approx(truth.pair_s, rel=0.06)


@pytest.mark.parametrize(("slow", "steps"), [(2.0, 5), (0.4, 16)])
def test_seconds_do_not_follow_one_odd_step(slow, steps):
    """Nor are they off by a part of it, as they would be if all rows weighed the same."""
    plan = plan_of([3000, 200, 500, 700, 90, 1500], [0, 1])
    found, wanted = (predict(plan, c).busy_s for c in (learned(off(TRUTH, pair=3.0), steps, 1, slow), TRUTH))
    assert found == pytest.approx(wanted, rel=0.02)


def test_what_evenly_packed_steps_do_not_show_keeps_the_ratios_of_the_prior():
    """All rows alike: one number is told, the seconds of a rank, and the mix of the prior stays."""
    prior = off(TRUTH, pair=3.0)
    window = refit.Window(prior)
    for _ in range(8):
        plan = plan_of([1000] * 12, [0, 1, 1, 0])
        window.add(refit.rows_of(plan, False), *measured(plan, TRUTH), 0.0)
    found = refit.with_coefficients(prior, window.coefficients())
    assert predict(plan, found).busy_s == pytest.approx(predict(plan, TRUTH).busy_s, rel=1e-3)
    for mine, before in ((found.forward, prior.forward), (found.backward, prior.backward)):
        assert mine.pair_s / mine.token_s == pytest.approx(before.pair_s / before.token_s, rel=1e-6)
        assert mine.launch_s / mine.token_s == pytest.approx(before.launch_s / before.token_s, rel=1e-6)


def test_the_prior_stands_until_there_are_steps_enough():
    prior = off(TRUTH, pair=3.0)
    assert learned(prior, steps=refit.FEWEST_STEPS - 1) == prior
    assert learned(prior, steps=refit.FEWEST_STEPS) != prior


def test_no_coefficient_is_negative_and_a_prior_of_zero_can_grow():
    prior = off(TRUTH, pair=0.0)
    found = learned(prior)
    assert found.forward.pair_s == pytest.approx(TRUTH.forward.pair_s, rel=0.15)
    flat = TRUTH.model_copy(update={"forward": PassCost(token_s=2e-6), "backward": PassCost(token_s=4e-6)})
    assert (refit.coefficients(learned(flat, noise=0.3)) >= 0).all()


def test_replays_are_forward_work_inside_backward_and_useless_forwards_are_left_out():
    micro_batches = (MicroBatch((Slice(0, 0, 64), Slice(1, 0, 32)), (0,)), MicroBatch((Slice(2, 0, 80),), (1,)))
    order = ((Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1)),)
    plan = check(StepPlan(as_lengths([64, 32, 80]), micro_batches, Limits(2, 256), order=order, replayed=(0,)))
    work = refit.rows_of(plan, recompute=False)
    amounts = [1, 96, 0.5 * (64**2 + 32**2)]
    assert not work[0, 0].any(), "its forward keeps nothing"
    assert work[0, 1].tolist() == [*amounts, *amounts]
    assert work[1, 0].tolist() == [1, 80, 3200, 0, 0, 0]
    assert work[1, 1].tolist() == [0, 0, 0, 1, 80, 3200]
    assert refit.rows_of(plan, recompute=True)[0, 1].tolist() == [0, 0, 0, *amounts]
    seconds = np.stack(measured(plan, TRUTH), axis=1)
    told = work @ refit.coefficients(TRUTH)[:6]
    assert told[1] == pytest.approx(seconds[1])
    assert told[0, 1] == pytest.approx(seconds[0, 1])


def test_padding_dummies_and_groups_count_as_the_cost_model_counts_them():
    micro_batches = (
        MicroBatch((Slice(0, 0, 30), Slice(1, 0, 20)), (0, 1), 32),
        MicroBatch((), (0,)),
        MicroBatch((Slice(2, 0, 50),), (1,)),
    )
    plan = StepPlan(as_lengths([30, 20, 50]), micro_batches, Limits(2, 256))
    told = refit.rows_of(plan, False) @ refit.coefficients(TRUTH)[:6]
    assert told == pytest.approx(np.stack(measured(plan, TRUTH), axis=1))


def test_the_window_forgets_and_survives_json_to_the_last_bit():
    draw, plan = np.random.default_rng(0), plan_of([300, 40, 500, 700, 20, 10], [0, 1])
    window = refit.Window(TRUTH)
    for _ in range(refit.WINDOW_STEPS + 3):
        seconds = draw.random((2, 2))
        window.add(refit.rows_of(plan, False), seconds[0], seconds[1], float(draw.random()))
    assert len(window.state()) == refit.WINDOW_STEPS
    other = refit.Window(TRUTH)
    other.restore(json.loads(json.dumps(window.state())))
    assert other.coefficients().tobytes() == window.coefficients().tobytes()
    many = refit.Window(TRUTH)
    for _ in range(9):
        many.add(np.ones((1024, 2, 6)), np.ones(1024), np.ones(1024), 0.0)
    assert len(many.state()) == refit.FEWEST_STEPS


def test_the_rest_of_a_step_is_the_update():
    """Passes 2 s as predicted but half as fast, 0.5 s of talk, 0.1 s of update shared by two ranks."""
    told = {"predicted_s": 2.5 + 0.05, "compute_s": 2.0, "update_s": 0.1, "shares": 2}
    assert refit.rest_of_step(4.0 + 0.5 + 0.05, busiest=(4.0, 2.0), **told) == pytest.approx(0.1)
    assert refit.rest_of_step(4.0 + 0.5 + 0.2, busiest=(4.0, 2.0), **told) == pytest.approx(0.4)
