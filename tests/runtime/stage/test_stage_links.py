"""Links between pipeline stages, as far as one process can tell."""

from collections import deque

import pytest
import torch
from evenload.core.plan.step_plan import Op
from evenload.runtime.stage.stage_links import StageLinks, has_one_queue, pairs, taken_before


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


@pytest.mark.parametrize(
    ("backend", "queues", "one"),
    [
        ("cuda:nccl", "1", True),
        ("cpu:gloo,cuda:nccl", "1", True),
        ("cuda:nccl", "8", False),
        ("cpu:gloo,cuda:gloo", "1", False),
    ],
)
def test_whether_a_device_has_one_queue(monkeypatch, backend, queues, one):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert has_one_queue(backend) is one


def test_every_link_is_in_one_group_and_every_rank_in_one_of_each_kind():
    rows = [(0, 2, 4), (1, 3, 5)]
    assert pairs(rows, 0) == [(0, 2), (4,), (1, 3), (5,)]
    assert pairs(rows, 1) == [(0,), (2, 4), (1,), (3, 5)]


def test_results_are_held_back_until_their_turn(monkeypatch):
    sent = []
    links = StageLinks.__new__(StageLinks)
    links._inside, links._holds, links._held = None, True, {"F": deque(), "B": deque()}
    monkeypatch.setattr(StageLinks, "_issue", lambda _, op, tensor: sent.append(op))
    links.send(Op("F", 0), torch.zeros(1))
    links.send(Op("F", 1), torch.zeros(1))
    assert sent == []
    links.turn("F")
    assert sent == [Op("F", 0)]
    links.send(Op("B", 0), torch.zeros(1))
    links.turn("B")
    assert sent == [Op("F", 0), Op("B", 0)]
    links._holds = False
    links.send(Op("F", 2), torch.zeros(1))
    assert sent[-1] == Op("F", 2)
