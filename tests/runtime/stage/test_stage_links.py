"""Links between pipeline stages, as far as one process can tell."""

from __future__ import annotations

import pytest
from evenload.core.plan.step_plan import Op
from evenload.runtime.stage.stage_links import taken_before, warn_of_one_queue


def test_what_a_neighbour_has_taken_before_each_of_its_passes():
    order = [Op("F", 0), Op("F", 1), Op("B", 1), Op("W", 1), Op("F", 2), Op("B", 0), Op("B", 2), Op("W", 0)]
    assert taken_before(order) == {
        Op("F", 0): 0,
        Op("F", 1): 0,
        Op("B", 1): 2,
        Op("F", 2): 1,
        Op("B", 0): 3,
        Op("B", 2): 3,
    }


@pytest.mark.parametrize(("backend", "queues", "warned"), [("nccl", "1", 1), ("nccl", "8", 0), ("gloo", "1", 0)])
def test_one_hardware_queue_for_all_streams_is_warned_of(monkeypatch, caplog, backend, queues, warned):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    warn_of_one_queue(backend)
    assert len(caplog.records) == warned
