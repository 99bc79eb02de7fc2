"""Two stages on each device: any lawful plan gives plain training's loss and gradients, in float64 on real ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_FILE = Path(__file__).with_name("v_world.py")
_spec = importlib.util.spec_from_file_location("v_world", _FILE)
v_world = importlib.util.module_from_spec(_spec)
sys.modules["v_world"] = v_world
_spec.loader.exec_module(v_world)

LENGTHS = [9, 1, 14, 3, 6, 2]
EXACT = 1e-12


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("kind", ["weights", "regrouped"])
@pytest.mark.parametrize(("ranks", "devices"), [(1, 2), (2, 2), (1, 4)])
def test_any_plan_of_a_v_trains_as_whole_sequences_do(world, ranks, devices, kind, one_queue) -> None:
    errors = world(ranks * devices).run(v_world.trained, [1, 2, 3], LENGTHS, ranks, devices, kind, one_queue)
    assert max(errors) < EXACT


@pytest.mark.parametrize("devices", [2, 4])
def test_forwards_alone_give_the_loss(world, devices) -> None:
    assert max(world(devices).run(v_world.scored, [4, 5, 6], LENGTHS, devices)) < EXACT
