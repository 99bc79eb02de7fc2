"""Tracked memory against cases that can be counted by hand. One float32 tensor of N values has 4 N bytes."""

import gc

import pytest
import torch
from evenload.runtime.measure.memory import Levels, StorageTracker
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
N = 1000
ONE = 4 * N
SCALAR = 4


def peak_of(work):
    with Levels(CPU) as levels:
        work()
    return levels.read()[1]


def leaf():
    return torch.linspace(0.0, 1.0, N).requires_grad_()


def chain(x, layers):
    for _ in range(layers):
        x = x.exp()  # saves its result
    return x


def test_temporaries_count_while_they_live():
    a = torch.ones(N)
    assert peak_of(lambda: (a + 1) * 2) == 2 * ONE
    assert peak_of(lambda: (a + 1).mul_(2)) == ONE


def test_views_and_what_was_there_before_count_nothing():
    """But a view keeps its whole storage, and what was freed before the peak is gone."""
    before = torch.ones(10, N // 10)

    def work():
        views = [before.t(), before[3:], before.view(-1), before.detach()]
        before.add_(1)
        new = before + 0
        views += [new.t(), new[2:], new.flatten(), *new.split(3)]
        kept = torch.ones(N)[:1]
        del new, views
        torch.ones(2 * N)
        del kept

    assert peak_of(work) == 3 * ONE


def test_a_resized_storage_is_followed():
    source = torch.ones(N)

    def work():
        a = torch.empty(0)
        torch.add(source, 1.0, out=a)
        a.resize_(2 * N)
        a.untyped_storage().resize_(0)
        a.set_()
        torch.ones(N)

    assert peak_of(work) == 2 * ONE


def test_what_autograd_saved_counts_until_its_backward():
    x = leaf()
    with StorageTracker(CPU) as tracker:
        y = chain(x, 5)
        assert tracker.level == 5 * ONE
        loss = y.sum()
        del y
        assert tracker.level == 5 * ONE + SCALAR
        loss.backward()
        del loss
        assert tracker.level == ONE, "the gradient of x"
    # At the first step back: five saved results, the loss, its gradient, and the gradient of the fifth exp.
    assert tracker.peak == 5 * ONE + 2 * SCALAR + ONE


def test_a_checkpoint_holds_one_part_at_a_time():
    x = leaf()

    def work():
        y = x
        for _ in range(4):
            y = checkpoint(chain, y, 5, use_reentrant=False)
        y.sum().backward()

    plain = peak_of(lambda: chain(x, 20).sum().backward())
    assert plain == 21 * ONE + 2 * SCALAR
    # Results of four parts; the last one again: its five results and a gradient.
    assert 4 * ONE + 5 * ONE <= peak_of(work) <= 4 * ONE + 5 * ONE + 2 * ONE + 2 * SCALAR


class Hungry(torch.autograd.Function):
    """Takes buffers of its own in both directions."""

    @staticmethod
    def forward(ctx, x):
        torch.zeros(3 * N)
        ctx.kept = torch.zeros(2 * N)
        return x + 1

    @staticmethod
    def backward(ctx, *grads):
        torch.zeros(7 * N)
        del ctx.kept
        return grads[0] * 2


def test_buffers_of_an_autograd_function_count_in_both_directions():
    x = leaf()
    assert peak_of(lambda: Hungry.apply(x)) == 3 * ONE
    x.grad = None
    # Kept 2, output 1 (its sum needs it no more, but `out` does), buffer 7; loss and its gradient are scalars.
    with StorageTracker(CPU) as tracker:
        out = Hungry.apply(x)
        out.sum().backward()
    assert tracker.peak == (2 + 1 + 7) * ONE + 2 * SCALAR


def test_attention_is_counted_with_its_saved_statistics():
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    one, statistics = q.numel() * 4, 2 * 64 * 4
    with StorageTracker(CPU) as tracker:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert tracker.level == one + statistics
        torch.autograd.grad(out.sum(), (q, k, v))
    assert tracker.peak == one + statistics + 2 * SCALAR + 3 * one


def test_nothing_is_left_of_a_tracker():
    kept = []
    with StorageTracker(CPU) as tracker:
        kept.append(torch.ones(N))
    assert tracker.level == ONE
    kept.clear()
    gc.collect()
    assert tracker.level == 0
    torch.ones(N)
    assert tracker.peak == ONE


@pytest.mark.gpu
def test_the_allocator_keeps_the_books_on_cuda():
    device = torch.device("cuda")
    held = torch.ones(1 << 20, device=device)
    with Levels(device) as levels:
        a = held + 1
        b = a * 2
        del a, b
    peak = levels.read()[1]
    assert peak == 2 * 4 * (1 << 20)
