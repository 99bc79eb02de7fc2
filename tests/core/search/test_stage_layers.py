"""What auto gives stages: against all numbers that there are, played on one plan."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from evenload.api import load_plugins
from evenload.core.planning.chain import PlanChain
from evenload.core.planning.judge import outcome_of
from evenload.core.recipe.recipe import parse
from evenload.core.search.stage_layers import _least, _under, settled

load_plugins()
LENGTHS = np.random.default_rng(3).integers(20, 400, 24)


def recipe(vocab_size, stages=3, layers=9, said="auto"):
    return parse(
        {
            "model": {"num_layers": layers, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": vocab_size},
            "parallel": {"pp": stages, "layers": said},
            "train": {"global_batch_size": 24},
            "plugins": {"pipeline": {"enabled": True, "max_tokens": 1024}},
        }
    )


@pytest.mark.parametrize("vocab_size", [256, 512, 1024, 2048])
def test_no_other_numbers_end_the_plan_sooner(vocab_size):
    auto = recipe(vocab_size)
    chosen = settled(auto, 3, LENGTHS)
    assert isinstance(chosen.parallel.layers, tuple)
    first = _least(PlanChain.of_recipe(auto, auto.layout(3)).context, LENGTHS, auto)
    numbered = recipe(vocab_size, said=first)
    chain = PlanChain.of_recipe(numbered, numbered.layout(3))
    plan = chain.plan(LENGTHS)
    ways = [one for one in itertools.product(range(1, 8), repeat=3) if sum(one) == 9]
    seconds = {one: _under(plan, chain.context, one).step_s for one in ways}
    assert seconds[chosen.parallel.layers] == min(seconds.values())


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
