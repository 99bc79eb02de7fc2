"""What auto gives stages, against all numbers that there are."""

import itertools

import numpy as np
import pytest
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import judge, outcome_of
from evenload.core.planning.stage_layers import first_numbers, settled
from evenload.core.recipe.recipe import parse

LENGTHS = np.random.default_rng(3).integers(20, 400, 24)


def recipe(vocab_size, stages=3, layers=9, said="auto", activation_gib=None):
    return parse(
        {
            "model": {"num_layers": layers, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": vocab_size},
            "parallel": {"pp": stages, "layers": said},
            "train": {"global_batch_size": 24},
            "plugins": {"pipeline": {"enabled": True, "max_tokens": 1024, "activation_gib": activation_gib}},
        }
    )


def planned(one, ranks, lengths=LENGTHS):
    chain = PlanChain.of_recipe(one, one.layout(ranks))
    return outcome_of(judge(chain.plan(lengths), chain.context).plan, chain.context)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [256, 1024])
def test_no_other_numbers_end_a_step_sooner(vocab_size):
    chosen = settled(recipe(vocab_size), 3, LENGTHS).parallel.layers
    divisions = [one for one in itertools.product(range(1, 8), repeat=3) if sum(one) == 9]
    least_s = min(planned(recipe(vocab_size, said=one), 3).step_s for one in divisions if max(one) < 6)
    assert planned(recipe(vocab_size, said=chosen), 3).step_s <= least_s * 1.003, "within the planner's own slack"


def test_neighbours_of_the_first_numbers_are_weighed_where_layers_are_recomputed():
    """First stages hold most, so one of them had better not be the largest."""
    rng = np.random.default_rng([3, 7, 256])
    lengths = rng.integers(20, 400, 24)
    ample = recipe(256, layers=7)
    first = first_numbers(ample, 3, lengths)
    assert first == (3, 2, 2)
    held_gib = float(planned(recipe(256, layers=7, said=first), 3, lengths).activation_bytes.max()) / 2**30
    chosen = settled(recipe(256, layers=7, activation_gib=0.3 * held_gib), 3, lengths).parallel.layers
    steps = [
        planned(recipe(256, layers=7, said=said, activation_gib=0.3 * held_gib), 3, lengths).step_s
        for said in (chosen, first)
    ]
    assert steps[0] < 0.95 * steps[1]


def test_a_step_of_what_auto_gives_is_shorter_where_the_output_layer_is_work():
    auto, equal = recipe(4096, stages=2, layers=8), recipe(4096, stages=2, layers=8, said=None)
    chosen = settled(auto, 2, LENGTHS)
    steps = []
    for one in (chosen, equal):
        chain = PlanChain.of_recipe(one, one.layout(2))
        steps.append(outcome_of(chain.plan(LENGTHS), chain.context))
    assert chosen.parallel.layers[0] > chosen.parallel.layers[1]
    assert steps[0].step_s < 0.9 * steps[1].step_s
    assert steps[0].bubble_frac < steps[1].bubble_frac


def test_numbers_that_are_said_stay():
    said = recipe(4096, said=[5, 3, 1])
    assert settled(said, 3, LENGTHS) is said
