"""Two stages on each device: any lawful plan gives plain training's loss and gradients, in float64 on real ranks."""

import pytest
from harness.cases import pairs

from . import v_world

LENGTHS = [9, 1, 14, 3, 6, 2]
EXACT = 1e-12


@pytest.mark.slow
@pairs(("ranks, devices", [(1, 2), (2, 2), (1, 4)]), ("kind", ["weights", "regrouped"]), ("one_queue", [False, True]))
def test_any_plan_of_a_v_trains_as_whole_sequences_do(world, ranks, devices, kind, one_queue):
    errors = world(ranks * devices).run(v_world.trained, [1, 2, 3], LENGTHS, ranks, devices, kind, one_queue)
    assert max(errors) < EXACT


@pytest.mark.parametrize("devices", [2, 4])
def test_forwards_alone_give_the_loss(world, devices):
    assert max(world(devices).run(v_world.scored, [4, 5, 6], LENGTHS, devices)) < EXACT
