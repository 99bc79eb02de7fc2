"""Offloaded activations on the CPU, where a copier that does nothing until somebody waits stands for the streams."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.runtime.measure.memory import Levels
from evenload.runtime.stage import offload
from evenload.runtime.stage.copier import Copier, HostMemory, StreamCopier, pieces
from evenload.runtime.stage.offload import Moved, layers_of, offloading
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
HIDDEN, HEADS, LAYERS = 32, 4, 6
BLOCK = 8000
LEAST = BLOCK // 4
"""Bytes; what is smaller are statistics of norms."""


class Job:
    """A copy that was asked for; ``run`` does it, and what must come before it."""

    def __init__(self, num_bytes, work, after):
        self.num_bytes, self._work, self._after = num_bytes, work, tuple(after)
        self.ran = False

    def run(self):
        if not self.ran:
            self.ran = True
            for job in self._after:
                job.run()
            self._work()
            self._work, self._after = lambda: None, ()  # they hold memory


class LateCopier:
    """Copies as late as it may: when somebody waits. Until then a target is full of NaN, and a source must be there."""

    def __init__(self):
        self.outs, self.backs = [], []

    def host_memory(self, num_bytes):
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def out(self, source, blocks, after):
        storage = weakref.ref(source.untyped_storage())

        def work():
            there = storage()
            assert there is not None, "memory was freed before it was copied"
            flat = torch.empty(0, dtype=torch.uint8).set_(there)
            for block, piece in pieces(blocks, flat):
                block[: len(piece)].copy_(piece)

        self.outs.append(Job(len(source), work, after))
        return self.outs[-1]

    def back(self, blocks, target, after):
        target.fill_(255)

        def work():
            for block, piece in pieces(blocks, target):
                piece.copy_(block)

        self.backs.append(Job(len(target), work, after))
        return self.backs[-1]

    def wait(self, moment):
        moment.run()

    def done(self, moment):
        return bool(moment.ran)


class Layer(nn.Module):
    """A transformer layer that saves views of one storage, one tensor in two nodes, and a parameter transposed."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x_TX):
        q, k, v = self.qkv(self.norm1(x_TX)).view(len(x_TX), 3, HEADS, -1).permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x_TX = x_TX + self.out(attended.transpose(0, 1).flatten(1))
        hidden = self.up(self.norm2(x_TX))
        return x_TX + self.down(hidden.sigmoid() * hidden.sigmoid().tanh() * hidden)


class Decoder(nn.Module):
    def __init__(self, layers=LAYERS, wrap=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, 64)
        self._wrap = wrap
        self.double()

    def forward(self, tokens_T):
        x = self.embedding(tokens_T)
        for layer in self.layers:
            x = self._wrap(layer, x) if self._wrap else layer(x)
        return self.head(x).logsumexp(-1).sum()


def tokens(count=40):
    return torch.arange(count) * 7 % 64


def gradients(model):
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def plain(model, *counts):
    for count in counts or (40,):
        model(tokens(count)).backward()
    return gradients(model)


def make_host(copier=None):
    return HostMemory(copier or LateCopier(), block_bytes=BLOCK, slab_bytes=50_000)


def all_is_free(host):
    return len(host._free) * BLOCK == host.num_bytes // 50_000 * (50_000 // BLOCK * BLOCK)


def forward(model, share, host, count=40):
    with offloading(share, layers_of(model), CPU, host=host) as moved:
        loss = model(tokens(count))
    return loss, moved


def offloaded(model, share, host, count=40):
    loss, moved = forward(model, share, host, count)
    loss.backward()
    return gradients(model), moved


def equal(ones, others):
    return len(ones) == len(others) and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("copier", [LateCopier, Copier])
def test_gradients_are_the_same_to_the_last_bit_and_host_memory_is_reused(share, copier):
    model, host, taken = Decoder(), make_host(copier()), set()
    for count in (64, 33, 64, 17):
        found, moved = offloaded(model, share, host, count)
        assert equal(found, plain(model, count))
        assert moved.back_bytes == moved.out_bytes > 0
        taken.add(host.num_bytes)
    assert len(taken) == 1
    assert all_is_free(host)


class NeverWaits(LateCopier):
    def wait(self, moment):
        pass


class WritesTooEarly(LateCopier):
    """Forgets that a block may still be read."""

    def out(self, source, blocks, after):
        job = super().out(source, blocks, [])
        job.run()
        return job


def interrupted(model, host):
    """Gradients of a pass whose backward stops while a layer is on its way back, and others take its host memory."""
    loss, _ = forward(model, 1.0, host)
    loss.backward(inputs=list(model.layers[4].parameters()), retain_graph=True)
    model.zero_grad()
    others = [forward(model, 1.0, host)[0] for _ in range(2)]
    loss.backward()
    del others
    return gradients(model)


@pytest.mark.parametrize("copier", [LateCopier, NeverWaits, WritesTooEarly])
def test_a_copy_that_comes_too_late_or_too_early_would_be_seen(copier):
    model, host = Decoder(), make_host(copier())
    assert equal(interrupted(model, host), plain(model)) == (copier is LateCopier)


def test_memory_that_is_freed_too_early_would_be_seen():
    copier = LateCopier()
    copier.done, copier.wait = lambda moment: True, lambda moment: None
    loss, _ = forward(Decoder(), 1.0, make_host(copier))
    with pytest.raises(AssertionError, match="freed before it was copied"):
        copier.outs[0].run()
    del loss


@given(st.floats(0.01, 1.0), st.integers(3, 8), st.lists(st.integers(20, 70), min_size=1, max_size=3))
def test_the_bytes_moved_are_the_share_of_those_seen(share, layers, counts):
    model, host = Decoder(layers), make_host()
    for count in counts:
        found, moved = offloaded(model, share, host, count)
        assert equal(found, plain(model, count))
        largest = 4 * HIDDEN * count * 8
        assert abs(moved.out_bytes - share * moved.seen_bytes) <= largest / 2
        assert sum(job.num_bytes for job in host.copier.outs) == moved.out_bytes
        host = make_host()


def saved_storages(model, count):
    """Sizes and identities of what each layer saves, by hooks of the test's own: storages that are not weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    groups, kept = [], []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() >= LEAST:
            kept.append(tensor.detach())
            if not any(storage.data_ptr() in group for group in groups):
                groups[-1][storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    groups.append({})
    handles = [layer.register_forward_pre_hook(lambda *_: groups.append({})) for layer in model.layers]
    handles.append(model.head.register_forward_pre_hook(lambda *_: groups.append({})))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens(count))
    for handle in handles:
        handle.remove()
    return [set(group.items()) for group in groups]


def test_all_of_the_inner_layers_and_nothing_else_moves_once():
    model, host = Decoder(), make_host()
    groups = saved_storages(model, 40)
    inner = [sum(size for _, size in group) for group in groups[2:LAYERS]]
    assert len(inner) == LAYERS - 2
    assert min(inner) > 0
    _, moved = offloaded(model, 1.0, host)
    assert moved.out_bytes == moved.seen_bytes == sum(inner)
    assert len(host.copier.outs) == sum(len(group) for group in groups[2:LAYERS])


def test_what_left_last_comes_back_first_one_layer_ahead():
    model, host = Decoder(), make_host()
    began = []
    per_layer = len(saved_storages(model, 40)[2])
    for number, layer in enumerate(model.layers):
        layer.register_full_backward_pre_hook(lambda *_, number=number: began.append(("layer", number)))
    loss, _ = forward(model, 1.0, host)
    outs = host.copier.outs
    assert len(outs) == per_layer * (LAYERS - 2)
    assert all(job.ran for job in outs)
    copier, ask = host.copier, type(host.copier).back

    def noted(blocks, target, after):
        job = ask(copier, blocks, target, after)
        began.append(("back", outs.index(after[0])))
        return job

    copier.back = noted
    loss.backward()
    order = [number for what, number in began if what == "back"]
    assert sorted(order) == list(range(len(outs)))
    assert [number // per_layer for number in order] == [k for k in (3, 2, 1, 0) for _ in range(per_layer)]
    assert all(order[k * per_layer] == len(outs) - k * per_layer - 1 for k in range(4))
    for inner in range(1, LAYERS - 1):
        first_of_layer = began.index(("back", inner * per_layer - 1))
        assert began.index(("layer", inner + 1)) < first_of_layer < began.index(("layer", inner))
        if inner < LAYERS - 2:  # not two layers ahead
            assert began.index(("layer", inner + 2)) < first_of_layer
            assert began.index(("back", (inner + 1) * per_layer - 1)) < began.index(("layer", inner + 1))


def held_after_forward(model, share, host):
    """(Bytes held between forward and backward, highest in the forward, highest in the backward)."""
    with Levels(CPU) as levels:
        loss, _ = forward(model, share, host, 64)
        held, top_forward = levels.read()
        loss.backward()
        _, top_backward = levels.read()
    del loss
    model.zero_grad()
    return held, top_forward, top_backward


def test_the_device_is_rid_of_what_waits_and_gets_it_back_two_layers_at_a_time():
    layers = 9
    model, host = Decoder(layers), make_host()
    for _ in range(2):  # gradients and host memory are there from the second time on
        offloaded(model, 1.0, host, 64)
    none, top, back = held_after_forward(model, 0.0, host)
    half, _, _ = held_after_forward(model, 0.5, host)
    full, top_full, back_full = held_after_forward(model, 1.0, host)
    groups = [sum(size for _, size in group) for group in saved_storages(model, 64)]
    inner, a_layer = sum(groups[2:layers]), groups[2]
    assert none - full == pytest.approx(inner, rel=0.02)
    assert none - half == pytest.approx(inner / 2, rel=0.05)
    assert top_full <= top - inner + 2.5 * a_layer  # one layer computes, one is on its way
    assert back_full < full + 4 * a_layer < back


def test_weights_never_move_wherever_their_memory_is():
    """Also as views of one flat buffer, as trainers keep them, and through views that forget the parameter."""
    model, host = Decoder(), make_host()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    weight = model.layers[2].up.weight

    def forgetful(module, args, output):
        return output + linear(args[0], weight.data) * 0 + linear(args[0], weight.detach().clone().t().t()) * 0

    model.layers[2].up.register_forward_hook(forgetful)
    _, moved = offloaded(model, 1.0, host)
    assert moved.out_bytes > 0
    assert all(job.num_bytes < flat.untyped_storage().nbytes() for job in host.copier.outs)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("which", ["all", "some"])
def test_layers_may_be_recomputed(reentrant, which):
    def wrap(layer, x):
        again = which == "all" or layer is model.layers[2]
        return checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)

    model, host = Decoder(wrap=wrap), make_host()
    want = plain(model)
    for _ in range(2):
        found, moved = offloaded(model, 1.0, host)
        assert equal(found, want)
        assert moved.out_bytes >= (40 * HIDDEN * 8 * (LAYERS - 2))
    assert equal(plain(Decoder()), want)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_passes_wait_at_once(order):
    model, host = Decoder(), make_host()
    counts, shares = (40, 23, 57), (1.0, 0.4, 0.0)
    losses = [forward(model, share, host, count)[0] for count, share in zip(counts, shares, strict=True)]
    want = plain(model, *(counts[i] for i in order))
    for i in order:
        losses[i].backward()
    assert equal(gradients(model), want)
    losses.clear()
    gc.collect()
    assert all_is_free(host)


def test_a_graph_without_a_backward_gives_its_memory_back():
    model, host = Decoder(), make_host()
    for _ in range(4):
        forward(model, 1.0, host)
    gc.collect()
    assert all_is_free(host)
    refuse = model.layers[4].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, 1.0, host)
    refuse.remove()
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers)
    assert equal(offloaded(model, 1.0, host)[0], plain(model))


def test_a_graph_may_run_backward_twice_and_be_differentiated_itself():
    model, host = Decoder(), make_host()
    weights = [model.layers[2].up.weight, model.layers[0].up.weight]

    def second(loss):
        first = torch.autograd.grad(loss, weights, create_graph=True)
        more = torch.autograd.grad(sum((g**2).sum() for g in first), weights, retain_graph=True)
        return [*first, *more, *torch.autograd.grad(loss, weights)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = second(model(tokens()))
        loss, moved = forward(model, 1.0, host)
        found = second(loss)
    assert equal(found, want)
    assert moved.back_bytes == moved.out_bytes


def test_what_something_else_keeps_need_not_come_back():
    model, host = Decoder(), make_host()
    keep = []
    model.layers[2].qkv.register_forward_hook(lambda module, args, output: keep.append(output))
    found, moved = offloaded(model, 1.0, host)
    assert equal(found, plain(model))
    assert moved.out_bytes - moved.back_bytes == keep[0].untyped_storage().nbytes()


class Emptied(torch.autograd.Function):
    """A module whose output is discarded when its reader has read it, and made again before the reader's backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


def test_memory_that_the_trainer_empties_and_fills_again_stays_its_own():
    def discarding(layer, x):
        x = layer(x)
        made = Emptied.apply(x / x.norm())
        read = made * made.detach().sum(-1, keepdim=True)
        storage, size, values = made.untyped_storage(), made.untyped_storage().nbytes(), made.detach().clone()

        def fill(gradient):
            storage.resize_(size)
            made.data.copy_(values)

        read.register_hook(fill)
        storage.resize_(0)
        return read / 100

    model = Decoder(wrap=discarding)
    want = plain(model)
    for copier in (LateCopier(), Copier()):
        assert equal(offloaded(model, 1.0, make_host(copier))[0], want)


def test_a_tensor_changed_and_saved_again_travels_again():
    class Adds(nn.Module):
        def forward(self, x):
            y = x + 1
            y.detach_().requires_grad_()  # its own root, so that its first reader's gradient is not wanted
            with torch.no_grad():
                y.add_(1)
            return x + y.exp() * y

    model, host = nn.Sequential(*(Adds() for _ in range(5))).double(), make_host()
    x = torch.linspace(0, 1, 2000, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    with offloading(1.0, list(model), CPU, host=host):
        loss = model(x).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], want)


def test_without_room_on_the_host_activations_stay(caplog):
    class Small(LateCopier):
        def host_memory(self, num_bytes):
            if host.num_bytes >= 100_000:
                raise RuntimeError("out of memory (planted)")
            return super().host_memory(num_bytes)

    model, host = Decoder(), make_host(Small())
    with caplog.at_level(logging.WARNING, "evenload"):
        for _ in range(2):
            found, moved = offloaded(model, 1.0, host)
            assert equal(found, plain(model))
            assert 0 < moved.out_bytes <= 100_000 < moved.seen_bytes
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "planted" in caplog.text


def test_on_a_cpu_nothing_moves_and_that_is_said_once(caplog):
    offload._tell_of_cpu.cache_clear()
    model = Decoder()
    with caplog.at_level(logging.WARNING, "evenload"):
        for _ in range(2):
            with offloading(0.5, layers_of(model), CPU) as moved:
                loss = model(tokens())
            loss.backward()
            assert equal(gradients(model), plain(model))
    assert moved == Moved()
    assert len(caplog.records) == 1


def test_no_share_and_two_layers_are_nothing_to_do(caplog):
    for model, share in ((Decoder(), 0.0), (Decoder(2), 1.0)):
        with offloading(share, layers_of(model), CPU) as moved:
            model(tokens()).backward()
        assert moved == Moved()
    assert caplog.records == []
    with pytest.raises(EvenloadError, match="not between 0 and 1"), offloading(1.5, [], CPU):
        pass


def test_layers_of_a_model_are_its_longest_list():
    model = Decoder()
    assert list(layers_of(model)) == list(model.layers)
    model.layers[1].experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(99))
    model.towers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    assert list(layers_of(nn.Sequential(model))) == list(model.layers)
    with pytest.raises(EvenloadError, match="cannot be told apart"):
        layers_of(nn.Linear(1, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_gradients_are_the_same_to_the_last_bit():
    device = torch.device("cuda", torch.cuda.current_device())
    model = Decoder(8).to(device)
    host = HostMemory(StreamCopier(device), block_bytes=BLOCK, slab_bytes=1 << 20)
    for stream in (torch.cuda.current_stream(device), torch.cuda.Stream(device)):
        with torch.cuda.stream(stream), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for share in (0.5, 1.0):
                for counts in ((512,), (700, 300, 512)):
                    for count in counts:
                        model(tokens(count).to(device)).backward()
                    want = gradients(model)
                    losses = []
                    for count in counts:
                        with offloading(share, layers_of(model), device, host=host) as moved:
                            losses.append(model(tokens(count).to(device)))
                    assert moved.out_bytes > 0
                    for loss in losses:
                        loss.backward()
                    assert equal(gradients(model), want)
        torch.cuda.synchronize(device)
