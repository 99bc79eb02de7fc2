"""Seconds of experts, by a clock that operators move."""

from types import SimpleNamespace

import torch
from evenload.training.profiling.experts import timing_experts
from torch import nn


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Taking(torch.autograd.Function):
    """The identity, which takes so many seconds forward and twice as many backward."""

    @staticmethod
    def forward(ctx, values, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return values.clone()

    @staticmethod
    def backward(ctx, *gradients):
        ctx.clock.now += 2 * ctx.seconds
        return gradients[0], None, None


class Block(nn.Module):
    """Something before its experts, something that reads their input too, and something behind them."""

    def __init__(self, clock):
        super().__init__()
        self.experts, self.clock = Lasting(clock, 1.0), clock
        self.shared_experts = Lasting(clock, 100.0)

    def forward(self, values):
        values = Taking.apply(values, self.clock, 10.0)
        scores = Taking.apply(values, self.clock, 20.0)
        return Taking.apply(self.experts(values)[0] + scores + self.shared_experts(values)[0], self.clock, 40.0)


class Lasting(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, values):
        return Taking.apply(values, self.clock, self.seconds), None


def test_experts_are_timed_apart_from_what_surrounds_them():
    clock = Clock()
    model = nn.Sequential(Block(clock), Block(clock))
    with timing_experts(SimpleNamespace(model=model), clock) as seconds:
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert (seconds.forward_s, seconds.backward_s) == (2.0, 4.0)
    model(torch.ones(3, requires_grad=True)).sum().backward()
    assert (seconds.forward_s, seconds.backward_s) == (2.0, 4.0), "hooks are gone"
