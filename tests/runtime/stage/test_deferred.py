"""Weight gradients that come later, against torch's own backward."""

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.runtime.stage import deferred
from evenload.runtime.stage.deferred import WgradStore, deferring, replaced
from hypothesis import given
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Three linear layers, one without a bias, one used twice, and a norm between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)
        self.double()

    @property
    def linears(self):
        return [self.a, self.b, self.c]

    def inner(self, x):
        return self.b(torch.tanh(self.b(self.norm(x))))

    def forward(self, x, recompute=""):
        y = torch.tanh(self.a(x))
        y = checkpoint(self.inner, y, use_reentrant=recompute == "reentrant") if recompute else self.inner(y)
        return self.c(torch.tanh(y))


def inputs(count, shape=(5, 1, 6)):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(count)]


def plain(count):
    """(gradients by name, dx of every input) of torch's own backward."""
    net, xs = Net(), inputs(count)
    for x in xs:
        net(x).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters()}, [x.grad for x in xs]


def split_backward(later, number, net, x):
    """Forward and backward, up to the weight gradients."""
    with later.splitting(number):
        loss = net(x).square().sum()
    with later.splitting(number):
        loss.backward()


def assert_equal(net, xs, count):
    gradients, dxs = plain(count)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-12, atol=1e-12)
    for x, dx in zip(xs, dxs, strict=True):
        torch.testing.assert_close(x.grad, dx, rtol=1e-12, atol=1e-12)


@given(draw=st.randoms(use_true_random=False), recompute=st.sampled_from(["", "reentrant", "other"]))
def test_any_order_of_backwards_and_weight_gradients_gives_the_gradients_of_torch(draw, recompute):
    count = draw.randint(1, 4)
    net, xs, later = Net(), inputs(count), WgradStore()
    split = {i for i in range(count) if draw.random() < 0.7}
    with deferring(net.linears, later):
        losses = []
        for number, x in enumerate(xs):
            with later.splitting(number) if number in split else nullcontext():
                losses.append(net(x, recompute).square().sum())
        todo, waiting = list(range(count)), []
        while todo or waiting:
            if todo and (not waiting or draw.random() < 0.5):
                number = todo.pop(draw.randrange(len(todo)))
                if number not in split:
                    losses[number].backward()
                    continue
                with later.splitting(number):
                    losses[number].backward()
                waiting.append(number)
            else:
                later.run(waiting.pop(draw.randrange(len(waiting))))
    later.check_empty()
    assert_equal(net, xs, count)


def test_the_backward_leaves_only_what_may_wait():
    net, (x,), later = Net(), inputs(1), WgradStore()
    with deferring(net.linears, later):
        split_backward(later, 0, net, x)
    assert x.grad is not None
    there = {name for name, p in net.named_parameters() if p.grad is not None}
    assert there == {"a.bias", "c.bias", "norm.weight", "norm.bias"}
    later.run(0)
    assert_equal(net, [x], 1)


def test_products_are_computed_once_and_taken_over_by_the_weight():
    net, xs, later = Net(), inputs(2), WgradStore()
    made, product = [], deferred.weight_gradient

    def noting(x, dy):
        result = product(x, dy)
        made.append(result.data_ptr())  # not the tensor: one that somebody holds is copied
        return result

    with patch.object(deferred, "weight_gradient", noting), deferring(net.linears, later):
        for number, x in enumerate(xs):
            split_backward(later, number, net, x)
        assert not made
        later.run(0)
        assert len(made) == 4  # b is used twice
        assert net.a.weight.grad.data_ptr() == made[-1]
        later.run(1)
        assert len(made) == 8


def test_hooks_of_trainers_fire_with_the_weight_gradient_and_not_before():
    net, xs, later, fired = Net(), inputs(2), WgradStore(), []
    main = {name: torch.zeros_like(p) for name, p in net.named_parameters()}

    def hook(name, parameter):
        """As trainers do: add to a buffer of their own, and take the gradient away."""

        def run(*_):
            fired.append(name)
            main[name] += parameter.grad
            parameter.grad = None

        return run

    nodes = []
    for name, parameter in net.named_parameters():
        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(hook(name, parameter))
    weights = ["a.weight", "b.weight", "c.weight"]
    with deferring(net.linears, later):
        for number, x in enumerate(xs):
            split_backward(later, number, net, x)
        assert not set(weights) & set(fired)
        for number in (1, 0):
            fired.clear()
            later.run(number)
            assert sorted(set(fired)) == weights
    gradients, _ = plain(2)
    for name, total in main.items():
        torch.testing.assert_close(total, gradients[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", ["", "reentrant"])
def test_what_waits_is_counted_once_freed_by_its_run_and_keeps_nothing_else_of_the_pass(recompute):
    """Not the pass's input and its gradient, nor those of layers that are recomputed."""
    net, (x,), later = Net(), inputs(1, (7, 6)), WgradStore()
    norm, inner, waiting = nn.LayerNorm(6).double(), [], []
    net.norm.register_forward_pre_hook(lambda _, args: inner.append(weakref.ref(args[0])))
    with deferring(net.linears, later):
        split_backward(later, 0, lambda x: net(norm(x), recompute), x)
        gone = [*inner, weakref.ref(x), weakref.ref(x.grad)]
        del x
        gc.collect()
        wide = 6 + 8 + 8 + 8 + 8 + 8 + 8 + 3  # x and dy of a, b, b and c
        assert later.held_bytes() == 7 * wide * 8
        assert all(reference() is None for reference in gone)
        waiting += [weakref.ref(item.dy) for item in later._left[0]]
        later.run(0)
    gc.collect()
    assert later.held_bytes() == 0
    assert len(waiting) == 4
    assert all(reference() is None for reference in waiting)


def test_frozen_weights_and_inputs_without_gradient_leave_nothing():
    net, (x,), later = Net(), inputs(1), WgradStore()
    net.b.weight.requires_grad_(False)
    with deferring(net.linears, later):
        split_backward(later, 0, net, x.detach())
        later.run(0)
    gradients, _ = plain(1)
    assert net.b.weight.grad is None
    torch.testing.assert_close(net.a.weight.grad, gradients["a.weight"])


def test_under_autocast_weight_gradients_stay_in_the_backward():
    found = []
    for later in (WgradStore(), None):
        net, x = Net().float(), inputs(1)[0].detach().float().requires_grad_()
        with deferring(net.linears, later) if later else nullcontext(), later.splitting(0) if later else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(x).square().sum()
            loss.backward()
        if later:
            later.run(0)
        found.append([p.grad for p in net.parameters()])
    for split, whole in zip(*found, strict=True):
        assert torch.equal(split, whole)


def test_layers_are_as_they_were_afterwards_also_after_an_error():
    net, later = Net(), WgradStore()
    before = [dict(vars(layer)) for layer in net.linears]
    with pytest.raises(RuntimeError), deferring(net.linears, later):
        net(torch.zeros(2, 5, dtype=torch.float64))
    assert [dict(vars(layer)) for layer in net.linears] == before


def test_a_layer_that_someone_else_has_changed_is_refused_and_left_alone():
    net, later = Net(), WgradStore()
    with replaced(net.b, "forward", net.b.forward):
        theirs = vars(net.b)["forward"]
        with pytest.raises(EvenloadError, match="replaced by someone else"), deferring(net.linears, later):
            pass
        assert vars(net.b)["forward"] is theirs
        assert "forward" not in vars(net.a)


@pytest.mark.parametrize("fault", ["never", "twice", "unknown"])
def test_weight_gradients_are_computed_exactly_once(fault):
    net, (x,), later = Net(), inputs(1), WgradStore()
    with deferring(net.linears, later):
        split_backward(later, 4, net, x)
    if fault == "never":
        with pytest.raises(EvenloadError, match="missing at the end"):
            later.check_empty()
        later.check_empty()
        return
    later.run(4)
    with pytest.raises(EvenloadError, match="no backward has left"):
        later.run(4 if fault == "twice" else 5)
