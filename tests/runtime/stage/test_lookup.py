"""Embedding gradients in bfloat16 on the CPU."""

import torch
from evenload.runtime.stage.lookup import sum_in_float32
from torch import nn

IDS = torch.zeros(4096, dtype=torch.long)


def gradient(embedding):
    embedding(IDS).float().sum().backward()
    return float(embedding.weight.grad[0, 0])


def test_the_sum_is_whole_and_the_values_are_the_same():
    """Of torch alone 4,096 ones sum to 256."""
    embedding = nn.Embedding(2, 3, dtype=torch.bfloat16)
    plain = embedding(IDS).detach()
    sum_in_float32(embedding)
    assert gradient(embedding) == 4096
    assert torch.equal(embedding(IDS), plain)
    assert isinstance(embedding, nn.Embedding)
    assert list(embedding.state_dict()) == ["weight"]
    assert embedding.weight.dtype == torch.bfloat16


def test_other_dtypes_are_left_alone():
    embedding = nn.Embedding(2, 3, dtype=torch.float64)
    sum_in_float32(embedding)
    assert embedding(IDS).dtype == torch.float64
    assert gradient(embedding) == 4096
