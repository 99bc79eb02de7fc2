"""Mixes against references written from the papers' equations, in whatever order ranks and micro-batches report."""

import math
from itertools import pairwise

import evenload
import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.errors import EvenloadError
from evenload.core.policies import (
    DataPolicy,
    DomainsToMix,
    Proportions,
    SeenDomains,
    chosen_policy,
    seen_domains,
    started,
    stepped,
)
from evenload.core.registry import DataPlugin, PluginConfig, data_policies
from evenload.plugins.data.ado import MOST_POINTS, fitted
from hypothesis import given
from hypothesis import strategies as st

load_plugins()
DOMAINS = DomainsToMix(("chat", "code", "prose"), (0.2, 0.5, 0.3), (100, 5000, 900))


def chosen(name, **settings):
    return chosen_policy("mix", name, settings, data_policies("mix"))


def toy_steps(count, *, empty=False, seed=3):
    """What a toy has shown in each step: losses fall as power laws of what was seen, with noise."""
    rng = np.random.default_rng(seed)
    laws, total, out = [(1.0, 30.0, 0.4), (0.5, 8.0, 0.2), (2.0, 3.0, 0.1)], 0, []
    for step in range(count):
        targets = rng.integers(500, 1500, 3)
        if empty and step % 3 == 1:
            targets[step % 2] = 0
        total += int(targets.sum())
        means = np.array([e + b * total**-a for e, b, a in laws]) + rng.normal(0, 0.01, 3)
        excess = np.abs(rng.normal(0, 0.2, 3)) * targets
        out.append(SeenDomains(means * targets, targets, -(-targets // 200), excess))
    return out


def answers(policy, steps):
    state, answer = started(policy, DOMAINS)
    out = [answer]
    for seen in steps:
        state, answer = stepped(policy, state, seen, answer)
        out.append(answer)
    return out


def close(ours, reference):
    np.testing.assert_allclose([answer.shares for answer in ours], reference, rtol=1e-12, atol=0)


def test_temperature_is_a_power_of_sizes():
    roots = [math.sqrt(count) for count in DOMAINS.samples]
    close(answers(chosen("temperature", tau=2), toy_steps(2)), [[root / sum(roots) for root in roots]] * 3)


@pytest.mark.parametrize("reward", ["seen", "drawn"])
def test_odm_is_its_equation(reward):
    settings = {"smoothing": 0.8, "scale": 3.0, "floor": 0.05, "warmup_steps": 2, "reward": reward}
    steps, count = toy_steps(40, empty=True), 3
    rewards, shares, reference = [0.0] * count, list(DOMAINS.shares), [list(DOMAINS.shares)]
    explored = [1 / count]
    for number, seen in enumerate(steps, 1):
        for i in range(count):
            if seen.targets[i]:
                loss = seen.losses[i] / seen.targets[i]
                rewards[i] = 0.8 * rewards[i] + 0.2 * 3.0 * loss / (shares[i] if reward == "drawn" else 1)
        explored.append(min(1 / count, max(0.05, math.sqrt(math.log(count) / (count * number)))))
        if number > 2:
            odds = [math.exp(explored[-2] * value) for value in rewards]
            shares = [(1 - count * explored[-1]) * odd / sum(odds) + explored[-1] for odd in odds]
        reference.append(shares)
    close(answers(chosen("odm", **settings), steps), reference)
    assert len({tuple(shares) for shares in reference}) > 30


def test_a_floor_above_the_uniform_share_explores_alone():
    close(answers(chosen("odm", floor=0.9), toy_steps(3))[1:], [[1 / 3] * 3] * 3)


def test_doremi_is_its_equation_and_its_state_has_the_mean_of_alpha():
    steps, count, rate, uniform = toy_steps(30, empty=True), 3, 0.7, 0.02
    alphas, reference = [1 / count] * count, [[1 / count] * count]
    for seen in steps:
        excess = [seen.excess[i] / seen.targets[i] if seen.targets[i] else 0 for i in range(count)]
        grown = [alpha * math.exp(rate * one) for alpha, one in zip(alphas, excess, strict=True)]
        alphas = [(1 - uniform) * one / sum(grown) + uniform / count for one in grown]
        reference.append(alphas)
    policy = chosen("doremi", rate=rate, uniform=uniform)
    ours = answers(policy, steps)
    np.testing.assert_allclose([answer.objective for answer in ours], reference, rtol=1e-12)
    close(ours, [[1 / count] * count] * 31)
    state, answer = started(policy, DOMAINS)
    for seen in steps:
        state, answer = stepped(policy, state, seen, answer)
    np.testing.assert_allclose(state["average"], np.mean(reference[1:], axis=0), rtol=1e-12)


def reference_fit(points):
    """Least squares by numpy, an exponent at a time; without a rest where that would be below 0."""
    counts, losses = np.array(points).T
    best = None
    for exponent in np.arange(1, 101) / 100:
        x = (counts / counts[0]) ** -exponent
        columns = np.stack([np.ones_like(x), x], axis=1)
        (rest, slope), *_ = np.linalg.lstsq(columns, losses, rcond=None)
        if slope < 0:
            rest, slope = losses.mean(), 0.0
        if rest < 0:
            rest, slope = 0.0, max(0.0, float(x @ losses / (x @ x)))
        residual = float(((rest + slope * x - losses) ** 2).sum())
        if best is None or residual < best[0]:
            best = residual, rest, slope * counts[0] ** exponent, exponent
    return best[1:]


@pytest.mark.parametrize("count", ["all", "own"])
def test_ado_is_its_equation(count):
    steps = toy_steps(120, empty=True)
    prior, credit, mean = (np.array(DOMAINS.shares) for _ in range(3))
    seen_so_far, points = np.zeros(3), [[], [], []]
    fits = None
    reference = [list(DOMAINS.shares)]
    for number, seen in enumerate(steps, 1):
        seen_so_far = seen_so_far + (seen.targets.sum() if count == "all" else seen.targets)
        if number > 10:
            for i in range(3):
                if seen.targets[i]:
                    points[i].append((seen_so_far[i], seen.losses[i] / seen.targets[i]))
        credit = 0.9 * credit + 0.1 * seen.samples / seen.samples.sum()
        if number >= 30 and (number - 30) % 20 == 0:
            fits = [reference_fit(own) for own in points]
        shares = prior
        if fits:
            falls = [max(a, 0.05) * b * n**-a / n for (_, b, a), n in zip(fits, seen_so_far, strict=True)]
            wanted = np.array(falls) * prior * np.sqrt(credit * (1 - credit))
            wanted = np.maximum(wanted / wanted.sum(), 0.02)
            wanted = wanted / wanted.sum()
            shares = 0.8 * mean + 0.2 * wanted
            mean = (1 - 1 / (number + 1)) * mean + wanted / (number + 1)
        reference.append(list(shares / shares.sum()))
    settings = {"skip_steps": 10, "warmup_steps": 30, "every": 20, "smoothing": 0.2, "floor": 0.02, "count": count}
    close(answers(chosen("ado", **settings), steps), reference)
    assert len({tuple(shares) for shares in reference}) > 80


def test_a_power_law_without_noise_is_fitted_as_it_is():
    counts = np.geomspace(1e4, 1e9, 50)
    np.testing.assert_allclose(fitted(counts, 1.7 + 20 * counts**-0.23), (1.7, 20, 0.23), rtol=1e-8)
    rest, slope, _ = fitted(counts, np.linspace(1, 2, 50))
    assert (rest, slope) == (pytest.approx(1.5), 0.0), "a loss that rises has no slope"


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.randoms(use_true_random=False))
def test_sums_do_not_depend_on_ranks_and_micro_batches(seed, count, order):
    rng = np.random.default_rng(seed)
    domain, targets = rng.integers(0, 3, count), rng.integers(0, 50, count)
    losses, excess = rng.lognormal(0, 4, (2, count))
    whole = seen_domains(3, domain, losses, targets, excess)
    shuffled = np.array(order.sample(range(count), count))
    again = seen_domains(3, domain[shuffled], losses[shuffled], targets[shuffled], excess[shuffled])
    for one, other in zip(whole, again, strict=True):
        assert one.tolist() == other.tolist()
    assert whole.samples.sum() == count


@pytest.mark.parametrize("name", ["temperature", "odm", "doremi", "ado"])
def test_shares_are_shares_whatever_is_seen(name):
    policy = chosen(name, **({"skip_steps": 0, "warmup_steps": 3, "every": 1} if name == "ado" else {}))
    nothing, counts = np.zeros(3, dtype=np.int64), np.array([7, 5, 3])
    huge = SeenDomains(np.array([1e100, 0, 1e-300]), counts, counts, np.array([700.0, 0, 0]) * counts)
    for answer in answers(policy, [SeenDomains(np.zeros(3), nothing, nothing, np.zeros(3)), huge, *toy_steps(6)]):
        assert math.fsum(answer.shares) == pytest.approx(1, abs=1e-15)
        assert min(answer.shares) >= 0


@pytest.mark.parametrize(
    "answer",
    [
        lambda: (_ for _ in ()).throw(ZeroDivisionError("theirs")),
        lambda: Proportions((0.5, 0.5, math.nan)),
        lambda: Proportions((1.5, -0.5, 0.0)),
        lambda: Proportions((0.5, 0.5)),
        lambda: Proportions((0.0, 0.0, 0.0)),
        lambda: Proportions((0.2, 0.3, 0.5), (1.0, math.inf, 1.0)),
        lambda: None,
    ],
)
def test_what_is_no_answer_changes_nothing_and_is_said(answer, caplog):
    def step(state, seen, settings):
        return {"step": 9}, answer()

    theirs = DataPolicy(lambda of, _: ({"step": 0}, Proportions(of.shares)), step)
    policy = chosen_policy("mix", "theirs", {}, {"theirs": theirs})
    state, last = started(policy, DOMAINS)
    with caplog.at_level("WARNING", logger="evenload"):
        assert stepped(policy, state, toy_steps(1)[0], last) == ({"step": 0}, last)
    assert "the mix policy 'theirs' failed, and what it answered last goes on" in caplog.text


def test_a_state_that_json_does_not_hold_is_no_state():
    odd = DataPolicy(
        lambda of, _: ({"step": 0}, Proportions(of.shares)),
        lambda state, seen, _: ({"loss": math.nan}, Proportions((1.0, 0.0, 0.0))),
    )
    policy = chosen_policy("mix", "odd", {}, {"odd": odd})
    state, last = started(policy, DOMAINS)
    assert stepped(policy, state, toy_steps(1)[0], last) == (state, last)


def test_names_and_settings_that_are_not_there_are_refused_with_the_nearest():
    with pytest.raises(EvenloadError, match="there is no mix policy 'odn'") as caught:
        chosen("odn")
    assert "did you mean 'odm'?" in caught.value.do
    with pytest.raises(EvenloadError, match="has no key 'smoothin'") as caught:
        chosen("odm", smoothin=0.5)
    assert "did you mean 'smoothing'?" in caught.value.do
    with pytest.raises(EvenloadError, match="smoothing is not valid"):
        chosen("odm", smoothing=1.5)


def test_a_policy_without_what_it_needs_is_refused():
    policy = chosen("doremi")
    state, last = started(policy, DOMAINS)
    with pytest.raises(EvenloadError, match="'doremi' needs what is not there") as caught:
        stepped(policy, state, toy_steps(1)[0]._replace(excess=None), last)
    assert caught.value.found == "no excess"


def test_other_packages_offer_policies_as_plugins_do():
    uniform = DataPolicy(
        lambda of, _: ({}, Proportions(of.shares)), lambda state, seen, _: (state, Proportions((1 / 3, 1 / 3, 1 / 3)))
    )
    theirs = DataPlugin(
        name="theirs",
        summary="uniform shares",
        papers=(),
        stage=6,
        config=PluginConfig,
        policies={"mix": {"uniform": uniform}},
    )
    evenload.register(theirs)
    try:
        close(answers(chosen("uniform"), toy_steps(1))[1:], [[1 / 3] * 3])
    finally:
        evenload.unregister("theirs")
    with pytest.raises(EvenloadError, match="no mix policy 'uniform'"):
        chosen("uniform")


def test_ado_keeps_steps_that_lie_evenly_and_the_first_of_all():
    """Steps are all alike, so that a step that is kept out of turn shows."""
    policy = chosen("ado", skip_steps=0, warmup_steps=10**6)
    state, answer = started(policy, DOMAINS)
    count = len(DOMAINS.shares)
    seen = SeenDomains(np.full(count, 20.0), np.full(count, 10), np.full(count, 2))
    for _ in range(600):
        state, answer = stepped(policy, state, seen, answer)
    for points in state["points"]:
        counts = [count for count, _ in points]
        assert len(counts) <= MOST_POINTS
        assert counts[0] == 10 * count
        assert {b - a for a, b in pairwise(counts)} == {4 * 10 * count}
