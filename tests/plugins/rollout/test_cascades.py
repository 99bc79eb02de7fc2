"""`plan_cascade`: devices are those of an integer program, thresholds those of trying all of them."""

from itertools import product

import numpy as np
import pulp
import pytest
from evenload import EvenloadError, plan_cascade
from evenload.core.errors import PlanError
from evenload.plugins.rollout import allot


def table(rng, models, devices):
    """Seconds that fall with devices but for some numbers that do not suit, and infinite ones where nothing fits."""
    seconds = rng.lognormal(0, 1, (models, 1)) * 20 / np.arange(1, devices + 1) ** rng.uniform(0.2, 1, (models, 1))
    seconds *= rng.lognormal(0, 0.2, seconds.shape)
    seconds[np.arange(devices) < rng.integers(0, 3, (models, 1))] = np.inf
    return seconds


def by_integer_program(seconds, num_devices):
    problem = pulp.LpProblem("devices", pulp.LpMinimize)
    slowest = pulp.LpVariable("slowest", 0)
    problem += slowest
    used = []
    for model, row in enumerate(seconds):
        chosen = {f: pulp.LpVariable(f"x{model}_{f}", cat="Binary") for f, s in enumerate(row, 1) if s < np.inf}
        problem += pulp.lpSum(chosen.values()) == 1
        problem += pulp.lpSum(row[f - 1] * x for f, x in chosen.items()) <= slowest
        used += [f * x for f, x in chosen.items()]
    problem += pulp.lpSum(used) <= num_devices
    problem.solve(pulp.HiGHS(msg=False, threads=1, gapRel=0))
    return slowest.value() if problem.status == pulp.LpStatusOptimal else np.inf


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.full) for n in range(10, 100))])
def test_devices_are_those_of_an_integer_program(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        models, num_devices = int(rng.integers(1, 5)), int(rng.integers(4, 13))
        seconds = table(rng, models, num_devices)
        devices, slowest = allot(seconds, num_devices)
        assert slowest == pytest.approx(by_integer_program(seconds, num_devices), rel=1e-6)
        if slowest < np.inf:
            assert sum(devices) <= num_devices
            assert max(row[f - 1] for row, f in zip(seconds, devices, strict=True)) == slowest


def test_devices_that_are_left_are_for_the_next_slowest():
    seconds = np.array([[9.0, 9, 9, 9, 9, 9], [8, 4, 3, 2, 2, 2], [1, 0.9, 0.8, 0.7, 0.6, 0.5]])
    devices, slowest = allot(seconds, 6)
    assert (devices.tolist(), slowest) == ([1, 4, 1], 9.0)


def answers(rng, samples, models):
    """Scores of models, of which a dearer one is mostly better."""
    hard = rng.normal(size=(samples, 1))
    return np.round(1 / (1 + np.exp(hard - np.arange(models) - 0.7 * rng.normal(size=(samples, models)))), 2)


def by_trying_all(scores, seconds, num_devices, floor, weight):
    """The least (value, seconds, -quality) of any thresholds on any devices."""

    def judged(thresholds):
        quality, loads = 0.0, [0] * scores.shape[1]
        for row in scores:
            for model, score in enumerate(row):
                loads[model] += 1
                if model == len(thresholds) or score >= thresholds[model]:
                    break
            quality += score / len(scores)
        slowest = np.inf
        for devices in product(range(num_devices + 1), repeat=len(loads)):
            if sum(devices) <= num_devices and all(f > 0 for f, load in zip(devices, loads, strict=True) if load):
                took = (seconds[m][f - 1] * loads[m] / len(scores) for m, f in enumerate(devices) if loads[m])
                slowest = min(slowest, max(took))
        return slowest, quality

    kinds = [[*np.unique(scores[:, model]), np.inf] for model in range(scores.shape[1] - 1)]
    all_judged = [judged(thresholds) for thresholds in product(*kinds)]
    small, large = all_judged[0], all_judged[-1]
    spans = [span if 0 < span < np.inf else 1.0 for span in (large[0] - small[0], large[1] - small[1])]
    return min(
        (max(weight * (s - small[0]) / spans[0], (1 - weight) * (large[1] - q) / spans[1]), s, -q)
        for s, q in all_judged
        if q >= floor - 1e-12 and s < np.inf
    )


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.2])
@pytest.mark.parametrize(("models", "samples", "devices"), [(2, 30, 6), (3, 9, 5)])
def test_thresholds_are_those_of_trying_all(models, samples, devices, weight):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        scores = answers(rng, samples, models)
        seconds = table(rng, models, devices) * 4.0 ** np.arange(models)[:, None]
        seconds[~np.isfinite(seconds)] = 1e4
        for floor in (0.0, float(scores.mean())):
            plan = plan_cascade(scores, seconds, devices, floor, weight=weight)
            value, least_s, quality = by_trying_all(scores, seconds, devices, floor, weight)
            assert (plan.seconds, plan.quality) == pytest.approx((least_s, -quality), abs=1e-9), (seed, floor, value)
            assert sum(plan.devices) <= devices
            assert [f > 0 for f in plan.devices] == [share > 0 for share in plan.shares]


def test_a_higher_floor_is_never_faster():
    rng = np.random.default_rng(1)
    scores, seconds = answers(rng, 200, 3), table(rng, 3, 16) * np.array([[1], [5], [25]])
    seconds[~np.isfinite(seconds)] = 1e3
    plans = [plan_cascade(scores, seconds, 16, floor, most=24) for floor in np.linspace(0.3, scores[:, -1].mean(), 8)]
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert plans[0].seconds < plans[-1].seconds
    assert plans[0].devices[2] == 0, "nothing comes to the dearest"


def test_latencies_are_asked_for_by_share():
    """Seconds that do not grow with the share: of plans that are equally fast the best one, where all go on."""
    asked = []

    def seconds(model, share):
        asked.append((model, share))
        return np.array([4.0, 2.0, 1.0]) if model else np.array([1.0, 0.9, 0.8])

    scores = np.array([[0.2, 1.0], [0.9, 1.0], [0.4, 0.5]])
    plan = plan_cascade(scores, seconds, 3, 0.8)
    assert (plan.devices, plan.seconds, plan.quality) == ((1, 2), 2.0, pytest.approx((1.0 + 1.0 + 0.5) / 3))
    assert plan.shares == (1.0, 1.0)
    assert len(asked) == len(set(asked))


def test_a_plan_stays_while_it_holds_and_goes_when_the_mix_shifts():
    rng = np.random.default_rng(2)
    scores, seconds = answers(rng, 300, 2), 10.0 * np.array([[1.0], [6.0]]) / np.arange(1, 9)
    plan = plan_cascade(scores, seconds, 8, 0.5)
    like = plan_cascade(answers(rng, 300, 2), seconds, 8, plan.quality - 0.05, earlier=plan, slack=1.0)
    assert (like.thresholds, like.devices) == (plan.thresholds, plan.devices)
    assert like.quality != plan.quality, "its figures are those of the new samples"
    harder = answers(rng, 300, 2) * np.array([[0.4, 1.0]])
    moved = plan_cascade(harder, seconds, 8, 0.5, earlier=plan)
    assert moved == plan_cascade(harder, seconds, 8, 0.5)
    assert (moved.thresholds, moved.devices) != (plan.thresholds, plan.devices)
    never = plan_cascade(answers(rng, 300, 2), seconds, 8, 0.1)
    assert never.devices[1] == 0
    easy = plan_cascade(harder, seconds, 8, 0.1, earlier=never)
    assert easy.seconds < np.inf, "no device for what comes to the dear one now, or nothing comes"


SCORES, SECONDS = np.array([[0.1, 0.9], [0.5, 0.8]]), np.ones((2, 4))
BAD = {
    "no samples": ({"scores": np.zeros((0, 2))}, "scores are no numbers"),
    "a score that is none": ({"scores": np.array([[0.1, np.nan]])}, "scores are no numbers"),
    "no device": ({"num_devices": 0}, "there is no device"),
    "a weight off the scale": ({"weight": 1.5}, "weight or slack is none"),
    "seconds of other devices": ({"seconds": np.ones((2, 3))}, "not of these models and devices"),
    "a floor that is too high": ({"floor": 0.9}, "best 0.85"),
    "a floor that is no number": ({"floor": np.nan}, "no thresholds keep the floor"),
    "what does not fit": ({"seconds": np.full((2, 4), np.inf)}, "do not fit the devices"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name):
    change, said = BAD[name]
    with pytest.raises(EvenloadError, match=said) as caught:
        plan_cascade(**{"scores": SCORES, "seconds": SECONDS, "num_devices": 4, "floor": 0.5} | change)
    assert isinstance(caught.value, PlanError) == ("fit" in name)


def test_one_model_needs_no_threshold():
    plan = plan_cascade(SCORES[:, :1], SECONDS[:1], 4, 0.2)
    assert (plan.thresholds, plan.devices, plan.shares) == ((), (1,), (1.0,))
