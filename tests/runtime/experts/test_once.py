"""Tokens that go once to a node: float64 on four gloo ranks, against experts that every rank has."""

import pytest
import torch
import torch.distributed as dist
from evenload.runtime.experts.once import counts_in_node, sent_once

SIZE, SLOTS, HIDDEN = 2, 8, 3
WEIGHTS_SH = torch.linspace(-1, 1, SLOTS * HIDDEN, dtype=torch.float64).view(SLOTS, HIDDEN)


def experts(hidden_TH, chosen_TS, probs_TS):
    """What the chosen experts make of tokens, each by its probability, added up."""
    outputs_TSH = torch.tanh(hidden_TH[:, None] * WEIGHTS_SH)
    return torch.einsum("tsh,ts->th", outputs_TSH, probs_TS * chosen_TS)


def drawn(rank, num_tokens, topk):
    generator = torch.Generator().manual_seed(rank)
    scores_TS = torch.rand(num_tokens, SLOTS, dtype=torch.float64, generator=generator)
    chosen_TS = torch.zeros(num_tokens, SLOTS, dtype=torch.bool).scatter(1, scores_TS.topk(topk).indices, True)
    hidden_TH = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, generator=generator)
    probs_TS = torch.where(torch.rand(scores_TS.shape, generator=generator) < 0.1, 0.0, scores_TS)
    return hidden_TH.requires_grad_(), chosen_TS, probs_TS.requires_grad_()


def of_rank(tokens, topk):
    rank = dist.get_rank()
    hidden, chosen, probs = drawn(rank, tokens[rank], topk)
    rows, hidden_WH, chosen_WS, probs_WS = sent_once(dist.group.WORLD, SIZE, hidden, chosen, probs)
    output = rows.summed(experts(hidden_WH, chosen_WS, probs_WS))
    output.square().sum().backward()
    got = output.detach(), hidden.grad, probs.grad
    hidden, chosen, probs = drawn(rank, tokens[rank], topk)
    plain = experts(hidden, chosen, probs)
    plain.square().sum().backward()
    counts = torch.stack([drawn(one, number, topk)[1].sum(dim=0) for one, number in enumerate(tokens)])
    return {
        "errors": [
            float((one - other).abs().max()) if one.numel() else 0.0
            for one, other in zip(got, (plain.detach(), hidden.grad, probs.grad), strict=True)
        ],
        "left": rows.left,
        "nodes": chosen.view(-1, 2, 4).any(dim=2).sum(dim=0).tolist(),
        "passed": chosen_WS.sum(dim=0).tolist(),
        "counts": counts_in_node(counts, rank, SIZE)[rank].tolist(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "topk"), [([9, 4, 0, 17], 3), ([5, 5, 5, 5], 1), ([0, 0, 6, 0], 8)], ids=["some", "one", "all"]
)
def test_sums_and_gradients_are_those_of_experts_at_hand(world, tokens, topk):
    for rank, result in enumerate(world(4).run(of_rank, tokens, topk)):
        assert max(result["errors"]) < 1e-12
        place = rank % SIZE
        assert result["left"][place::SIZE] == result["nodes"]
        assert sum(result["left"]) == sum(result["nodes"])
        own = slice(rank // SIZE * 4, rank // SIZE * 4 + 4)
        assert result["passed"][own] == result["counts"][own]
        assert sum(result["passed"]) == sum(result["passed"][own])
