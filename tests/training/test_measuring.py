"""What may be said of steps that variants took in turn: intervals by counting, verdicts on planted seconds."""

from itertools import product

import numpy as np
import pytest
from evenload.commands.tables.train import closing as closing_lines
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.planner import Draw
from evenload.core.recipe.recipe import parse
from evenload.training.measuring import Follower, compare, in_turn, interval_of_median


@pytest.mark.parametrize("count", range(6, 13))
def test_the_interval_misses_the_median_in_at_most_one_of_twenty_runs_and_no_narrower_one_would(count):
    """Whether a value lies below the true median is a coin: all 2^count throws are counted."""
    low, high = (int(x) for x in interval_of_median(range(count)) or [])
    below = [sum(throws) for throws in product((0, 1), repeat=count)]

    def missed(first, last):
        """Share of runs in which the median is not between the values of these places."""
        return float(np.mean([under <= first or under > last for under in below]))

    assert missed(low, high) <= 0.05 < missed(low + 1, high - 1)


def closing(*ratios, **more):
    compared = {**compare(ratios, [1.0] * len(ratios)), "same_plans": False, **more}
    return str(closing_lines({"in_order": compared}, {"device": "cpu"})[0])


def test_a_difference_is_claimed_beyond_the_noise_only():
    faster = closing(1.2, 1.3, 1.25, 1.4, 1.1, 1.3, loss_rel_diff=1.25e-7)
    assert "over 6 alternating steps (median, 95 % interval) evenload is 1.27x as fast as in_order (1.10x to" in faster
    assert "losses differ by at most 1.2e-07 of their size. Not shown: GPUs," in faster
    assert "0.80x as fast as in_order (0.70x to 0.90x)" in closing(0.8, 0.7, 0.9, 0.8, 0.8, 0.8)
    noise = closing(1.2, 1.3, 1.25, 1.4, 0.99, 1.3)
    assert "evenload is as fast as in_order within the noise (0.99x to 1.40x)" in noise
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
    follower = Follower(chain.__class__(chain.links, chain.context, chain.limits, instead="in_order"))
    for lengths in ([30, 500, 80, 200], [10, 300]):
        planned = follower.plan(Draw(np.arange(len(lengths)), np.array(lengths), {}))
        assert planned.plan.lengths.tolist() == lengths
        assert planned.plan.made_by == "in_order"
        assert planned.plan_s > planned.waited_s == 0
