"""A comparison is not fooled by what a judge likes, says no verdict where there is none, and takes people's word."""

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.plugins.verdicts import estimates
from evenload.plugins.verdicts.compare import compare
from evenload.plugins.verdicts.estimates import rate_at_equal_style, rate_of, sign_test
from evenload.plugins.verdicts.pairs import Pairs
from harness.cases import only_full

from .planted import Bias, World, judge_of, pairs_of, shipped_judge, sigmoid, true_rate

RUNS = [20, only_full(400)]
"""Few runs at every change: bounds are wide where there are few."""


@pytest.fixture(autouse=True)
def few_replicates(request, monkeypatch):
    monkeypatch.setattr(estimates, "REPLICATES", 200 if request.node.get_closest_marker("full") is None else 1000)


def compared(world, bias, runs, **how):
    return [compare(pairs_of(world, n, **how), judge_of(bias, n)) for n in range(runs)]


def share(results, holds):
    return sum(map(holds, results)) / len(results)


def within(runs, share, more=0.02):
    """Bounds of a share that is meant: ``more`` in 400 runs, and four standard errors in fewer."""
    error = max(more, 4 * (share * (1 - share) / runs) ** 0.5) if runs < 400 else more
    return share - error, min(1.0, share + error)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(
    ("world", "bias"),
    [
        (World(-0.6), Bias()),
        only_full(World(0.6, longer=0.75, lists=0), Bias()),
        only_full(World(-0.6, spread=0.2), Bias(position=1.5, length=6.0, lists=1.5)),
        only_full(World(), Bias(position=0.0, length=0.0, lists=0.0, ties=0.5)),
    ],
    ids=["usual", "B likes it long", "strong", "fair"],
)
def test_intervals_cover_the_rate_at_equal_style(world, bias, runs):
    truth, results = true_rate(world, bias), compared(world, bias, runs)
    low, high = within(runs, 0.95)
    rates = [one["equal_style"] for one in results]
    assert low <= share(rates, lambda rate: rate["low"] <= truth <= rate["high"]) <= high
    errors = np.array([rate["rate"] - truth for rate in rates])
    assert abs(errors.mean()) < 3 * errors.std() / runs**0.5 + 0.01


def test_a_plain_comparison_is_fooled_and_this_one_has_the_sign():
    """The longer and worse A wins in one order; at equal style it loses, as 66.7 % became 39.1 % in 2506.06331."""
    world, bias = World(-0.65), Bias()
    assert true_rate(world, bias) == pytest.approx(0.391, abs=0.01)
    results = compared(world, bias, 10, prompts=200)
    assert share(results, lambda one: one["one_order"]["low"] > 0.5) >= 0.8
    assert np.mean([one["one_order"]["rate"] for one in results]) == pytest.approx(0.60, abs=0.05)
    assert np.mean([one["equal_style"]["rate"] for one in results]) == pytest.approx(0.391, abs=0.03)
    verdicts = [one["verdict"] for one in results]
    assert verdicts.count("B") >= 8
    assert "A" not in verdicts


@pytest.mark.parametrize("runs", RUNS)
def test_equals_get_no_verdict(runs):
    results = compared(World(longer=1.0, lists=1), Bias(), runs)
    assert share(results, lambda one: one["verdict"] == "no verdict") >= within(runs, 0.95)[0]
    assert share(results, lambda one: one["judge"]["first"] > 0.5) > 0.95
    assert all("holds the middle" in one["says"] for one in results if one["verdict"] == "no verdict")


@pytest.mark.parametrize("runs", [20, only_full(200)])
def test_what_a_plain_win_rate_of_60_percent_is_worth(runs):
    """By a judge with the rates of verdicts that are shipped: texts of equal worth, one of which is often longer."""
    results = [compare(*shipped_judge(n)) for n in range(runs)]
    judge = {name: np.mean([one["judge"][name] for one in results]) for name in ("longer", "first", "flips")}
    assert judge == pytest.approx({"longer": 0.68, "first": 0.526, "flips": 0.129}, abs=0.02)
    assert np.mean([one["one_order"]["rate"] for one in results]) == pytest.approx(0.6, abs=0.02)
    assert share(results, lambda one: one["one_order"]["low"] > 0.5) >= 0.9
    assert share(results, lambda one: one["verdict"] == "no verdict") >= within(runs, 0.95)[0]


def test_intervals_are_over_prompts_not_over_verdicts():
    """Ten samples of a prompt share what it is worth: few prompts are few, however often they were sampled."""
    world, bias = World(spread=2.0, longer=1.0, lists=0), Bias(position=0.0, length=0.0, lists=0.0, ties=0.0)
    results = compared(world, bias, 20, prompts=40, samples=10)
    once = [rate_of(sigmoid(np.random.default_rng(n).normal(0, 2, 40)), np.arange(40)) for n in range(20)]
    widths = [one["both_orders"]["high"] - one["both_orders"]["low"] for one in results]
    assert np.mean(widths) == pytest.approx(np.mean([one.high - one.low for one in once]), rel=0.15)
    assert share(results, lambda one: one["both_orders"]["low"] <= 0.5 <= one["both_orders"]["high"]) >= 0.8
    style = [one["equal_style"]["high"] - one["equal_style"]["low"] for one in results]
    assert np.mean(style) > 0.9 * np.mean(widths)


def simple(texts, of=None):
    of = np.arange(len(texts)) if of is None else np.array(of)
    return Pairs(list(range(of.max() + 1)), [str(n) for n in range(of.max() + 1)], of, texts)


def by_rule(rule):
    return lambda questions: [rule(question) for question in questions]


def test_rates_by_hand():
    """Both orders, repeats and ties: A wins one prompt, ties one, and loses half of the pairs of a third."""
    pairs = simple([("good", "bad"), ("bad", "bad one"), ("bad", "good"), ("good it is", "good")], [0, 1, 2, 2])
    worth = {"good": 1, "bad": 0, "bad one": 0, "good it is": 1}
    result = compare(pairs, by_rule(lambda q: 0.5 + 0.5 * (worth[q.first] - worth[q.second])), repeats=3)
    assert result["both_orders"]["rate"] == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert result["calls"] == 4 * 2 * 3
    assert result["sign_test"] == {"wins": 1, "losses": 1, "ties": 1, "p": 1.0}
    assert result["judge"] == {"first": 0.5, "flips": 0.0, "repeats_differ": 0.0, "longer": pytest.approx(0.5)}
    assert result["by_length"]["within"]["prompts"] == 3
    assert result["verdict"] == "no verdict"
    assert result["words"] == [1.5, 1.25]


def test_a_judge_of_places_alone_wins_nothing():
    """Position decides but for one pair: one order says A, both orders say a tie."""
    pairs = simple([(f"a{n}", f"b{n}") for n in range(20)])
    result = compare(pairs, by_rule(lambda q: 0.5 if q.prompt == 0 else 1.0))
    assert result["one_order"]["rate"] == pytest.approx(0.975)
    assert result["both_orders"]["rate"] == 0.5
    assert result["judge"]["flips"] == pytest.approx(0.95)
    assert result["judge"]["first"] == pytest.approx(0.975)


def test_equal_texts_are_a_tie_that_nobody_is_asked_about():
    pairs = simple([("one", "one"), ("two", "three"), ("three", "two")])
    asked = []
    result = compare(pairs, by_rule(lambda q: asked.append(q.first) or float(q.first == "two")))
    assert set(asked) == {"two", "three"}
    assert result["calls"] == len(asked) == 4
    assert result["sign_test"]["ties"] == 1
    nothing = compare(simple([("one", "one"), ("two", "two")]), by_rule(lambda q: 1.0))
    assert (nothing["verdict"], nothing["calls"], nothing["judge"]["first"]) == ("no verdict", 0, None)


def test_style_that_cannot_be_told_from_worth_gives_no_verdict():
    """Every A has twice the words: a judge of worth and one of length would say the same."""
    pairs = simple([(f"a{n} and more", f"b{n}") for n in range(50)])
    result = compare(pairs, by_rule(lambda q: float(len(q.first) > len(q.second))))
    assert result["both_orders"]["low"] == 1.0
    assert (result["verdict"], result["equal_style"]) == ("no verdict", None)
    assert "A has more words for all but 0 prompts" in result["says"]


@pytest.mark.parametrize(("prompts", "verdict"), [(5, "no verdict"), (6, "A"), (40, "A")])
def test_five_prompts_are_too_few_however_they_end(prompts, verdict):
    pairs = simple([(f"good {n}", f"bad {n}") for n in range(prompts)])
    result = compare(pairs, by_rule(lambda q: float(q.first[0] == "g")))
    assert result["verdict"] == verdict


@pytest.mark.parametrize("runs", [60, only_full(1600)])
def test_the_interval_of_people_covers_what_people_think(runs, monkeypatch):
    """The judge likes A by far; people who judged an eighth of the prompts think a little less of it than of B."""
    covered, truth = 0, 0.45
    monkeypatch.setattr(estimates, "REPLICATES", 40)
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        pairs = simple([(f"a{n}", f"b{n}") for n in range(400)])
        people = rng.random(400) < truth
        says = np.where(rng.random(400) < 0.5, people, 1.0)
        judged = np.flatnonzero(rng.random(400) < 0.125)
        judge = by_rule(lambda q, says=says: says[q.prompt] if q.first[0] == "a" else 1 - says[q.prompt])
        result = compare(pairs, judge, people=(judged, people[judged].astype(float)))
        assert result["both_orders"]["low"] > 0.5
        covered += result["people"]["low"] <= truth <= result["people"]["high"]
        assert result["people"]["missed"] == pytest.approx(0.99 ** len(judged))
        assert result["says"].startswith("by people's verdicts")
    assert within(runs, 0.95)[0] <= covered / runs <= within(runs, 0.95)[1]
    few = compare(pairs, judge, people=(judged[:5], people[judged[:5]].astype(float)))
    assert (few["verdict"], few["says"]) == ("no verdict", "people judged fewer than 6 prompts")


def test_people_correct_a_prompt_by_the_pairs_of_it_that_they_judged():
    pairs = simple([("a", "b"), ("c", "d"), ("e", "f"), ("g", "h")], [0, 0, 1, 1])
    wins = {"a": 1.0, "c": 0.0, "e": 1.0, "g": 1.0}
    judge = by_rule(lambda q: wins[q.first] if q.first in wins else 1 - wins[q.second])
    result = compare(pairs, judge, people=(np.array([0, 2]), np.array([0.5, 1.0])))
    assert result["people"]["rate"] == pytest.approx(0.75 + (-0.5 + 0) / 2)
    assert result["people"]["prompts"] == 2


@pytest.mark.parametrize("answer", [0.0, 0.5, 1.0])
def test_a_judge_that_always_says_the_same_is_refused(answer):
    with pytest.raises(EvenloadError, match="says the same of every pair") as caught:
        compare(simple([("a", "b"), ("c", "d")]), by_rule(lambda q: answer))
    assert caught.value.found == f"{answer} for the first text in all 4 answers"


def test_sign_tests_by_hand():
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 6) == sign_test(6, 1) == pytest.approx(2 * 8 / 128)
    assert sign_test(600, 400) == pytest.approx(2.73e-10, rel=0.01)


def test_a_rate_needs_two_prompts_and_style_six_on_each_side():
    assert rate_of(np.array([1.0, 0.0]), np.array([3, 3])) is None
    counts = np.ones((12, 2, 3), np.int64)
    counts[:7, 0, 0] = 2
    assert rate_at_equal_style(np.ones(12), np.arange(12), counts) == "A has more words for all but 5 prompts"
    counts[:, ::-1, 0] = counts[:, :, 0].copy()
    assert rate_at_equal_style(np.ones(12), np.arange(12), counts) == "B has more words for all but 5 prompts"
