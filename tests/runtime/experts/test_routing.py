"""What the balance loss of a sequence needs of ranks that share it: counts of all its tokens, and not of some."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention.pack import Pack
from evenload.runtime.experts.routing import COUNTS_TAG, Routed, StepRouting

EXPERTS, LENGTH, OTHER = 3, 6, 4
"""A sequence of six tokens that two ranks share, and one of four that the first has alone."""


class Peer:
    """Rank 0's plane, over which rank 1 sends the counts that are given."""

    rank = 0

    def __init__(self, theirs):
        self.theirs, self.sent = theirs, []

    def post(self, sends, receives, tag):
        assert tag == COUNTS_TAG
        ((receiver, own_SE),) = sends
        assert [rank for rank, _ in receives] == [receiver] == [1]
        self.sent.append(own_SE.tolist())
        return SimpleNamespace(wait=lambda: {1: torch.tensor(self.theirs)})


def routed(start, stop, choices, theirs, *more):
    """Rank 0's part of the first sequence and what lies behind it; of its peer's part `theirs` tokens took expert 2."""
    micro_batch = MicroBatch((Slice(0, start, stop), *more), (0, 1))
    plane = Peer([[0, 0, theirs], *([0, 0, 0] for _ in more)])
    slices = (Slice(0, start, start + len(choices) - sum(s.length for s in more)), *more)
    borders = np.cumsum([0, *(s.length for s in slices)]).tolist()
    pack = Pack.of(
        [s.length for s in slices],
        borders,
        tokens_T=torch.zeros(borders[-1], dtype=torch.int64),
        labels_T=torch.zeros(borders[-1], dtype=torch.int64),
        positions_T=torch.arange(borders[-1]),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        num_targets=borders[-1],
        slices=slices,
        shared=SimpleNamespace(plane=plane, micro_batch=micro_batch),
    )
    return Routed(pack, 0, torch.tensor(choices)[:, None], EXPERTS)


def forward(step, one):
    scores = torch.ones(len(one.choices_TK), EXPERTS, requires_grad=True)
    step.sequence_loss(torch.zeros(()), scores, one, 1.0)


def test_counts_of_a_shared_sequence_are_taken_when_all_its_tokens_are_counted():
    step = StepRouting(np.array([LENGTH, OTHER]))
    begun, rest = routed(0, 4, [0, 1], theirs=2), routed(4, 6, [1], theirs=3)
    forward(step, begun)
    with pytest.raises(EvenloadError, match="before all tokens of its sequence") as caught:
        step.gradient(begun, 1.0)
    assert "2 of 6 tokens had one" in caught.value.found
    forward(step, rest)
    assert rest.pack.shared.plane.sent == [[[1, 2, 0]]], "all that this rank has seen of it"
    factor = step.per_sequence * EXPERTS / LENGTH**2
    for part in (begun, rest):
        expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * factor
        assert torch.allclose(step.gradient(part, 1.0), expected.expand(len(part.choices_TK), EXPERTS))


def test_a_sequence_that_lies_beside_it_is_complete_by_itself():
    step = StepRouting(np.array([LENGTH, OTHER]))
    one = routed(0, 6, [0, 0, 0, 2, 2, 2, 1], 3, Slice(1, 0, OTHER))
    forward(step, one)
    gradient = step.gradient(one, 2.0)
    assert torch.allclose(gradient[:3] / gradient[0].sum(), torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
    wanted = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64) * (2.0 * step.per_sequence * EXPERTS / OTHER**2)
    assert torch.allclose(gradient[3:], wanted.expand(OTHER, EXPERTS))
