"""What may be said of steps that variants took in turn: intervals by drawn noise, verdicts on planted seconds."""

import numpy as np
import pytest
from evenload.commands.tables.train import closing as closing_lines
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Draw
from evenload.core.recipe.recipe import parse
from evenload.training.measuring import BaselinePlanner, compare, in_turn, interval_of_totals


@pytest.mark.parametrize("count", [6, 7, 10, 11, 24])
@pytest.mark.parametrize("noise", ["normal", "standard_cauchy"])
def test_the_interval_misses_the_true_speedup_in_one_of_twenty_runs(count, noise):
    """Steps of unequal length, a baseline that takes 1.3 times as long, noise of any size as often above as below."""
    random, truth, missed = np.random.default_rng(count), 1.3, 0
    for _ in range(400):
        own = random.uniform(1.0, 4.0, count)
        off = 0.01 * getattr(random, noise)(size=count)
        low, high = interval_of_totals(truth * own + off, own)
        missed += not low <= truth <= high
    assert missed / 400 < 0.08  # 0.05 but for three deviations of 400 draws


def test_of_steps_that_do_not_differ_the_interval_is_their_ratio_and_five_are_too_few():
    assert interval_of_totals([2.6] * 12, [2.0] * 12) == pytest.approx([1.3, 1.3])
    assert interval_of_totals([2.6] * 5, [2.0] * 5) is None


def test_the_speedup_is_of_totals_so_that_long_steps_count_as_they_take():
    compared = compare([30.0, 1.0, 1.0], [10.0, 1.0, 1.0])
    assert compared["of_totals"] == pytest.approx(32 / 12)
    assert compared["median"] == 1.0


def closing(*ratios, **more):
    compared = {**compare(ratios, [1.0] * len(ratios)), "same_plans": False, **more}
    return str(closing_lines({"in_order": compared}, {"device": "cpu"})[0])


def test_a_difference_is_claimed_beyond_the_noise_only():
    faster = closing(1.2, 1.3, 1.25, 1.4, 1.1, 1.3, loss_rel_diff=1.25e-7)
    assert "speedup in 6 alternating steps (totals, 95 % interval): 1.26x over in_order (1.10x to 1.40x)" in faster
    assert "losses differ by at most 1.2e-07 of their size. Not shown: GPUs," in faster
    assert "0.80x over in_order (0.70x to 0.90x)" in closing(0.8, 0.7, 0.9, 0.8, 0.8, 0.8)
    noise = closing(1.2, 1.3, 1.25, 1.4, 0.99, 1.3)
    assert "none over in_order within the noise (0.99x to 1.40x)" in noise
    assert "no difference, as 5 alternating steps are too few to tell" in closing(1.2, 1.3, 1.25, 1.4, 1.1)
    assert "GPUs" not in str(closing_lines({"in_order": compare([1.0], [1.0])}, {"device": "cuda:0"})[0])


def test_every_variant_is_first_equally_often():
    names = ["stock", "in_order", "evenload"]
    turns = [in_turn(names, turn) for turn in range(6)]
    assert all(sorted(turn) == sorted(names) for turn in turns)
    assert [turn[0] for turn in turns] == names * 2


def test_a_baseline_plans_the_given_batch_and_no_step_pays_for_it():
    recipe = parse({"parallel": {"dp": 2}, "plugins": {"packing": {"enabled": True, "max_tokens": 512}}})
    chain = PlanChain.of_recipe(recipe, recipe.layout())
    follower = BaselinePlanner(chain.__class__(chain.links, chain.context, chain.limits, instead="in_order"))
    for lengths in ([30, 500, 80, 200], [10, 300]):
        planned = follower.plan(Draw(np.arange(len(lengths)), np.array(lengths), {}))
        assert planned.plan.lengths.tolist() == lengths
        assert planned.plan.made_by == "in_order"
        assert planned.plan_s > planned.waited_s == 0
