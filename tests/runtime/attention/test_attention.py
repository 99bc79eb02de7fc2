"""Packed attention against dense attention with an explicit mask, in float64, loss and gradients."""

import logging
from itertools import pairwise

import numpy as np
import pytest
import torch
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention import kernels
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.kernels import KERNELS, Kernel, KernelCall, choose_kernel
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from harness.attention import attention
from harness.attention import error as largest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

SDPA = KERNELS[-1]
LENGTHS = [1, 7, 1, 1, 30, 2, 64, 7]
HEADS = [(4, 4), (4, 2), (4, 1)]
DIM = 8


def random_parts(lengths, heads, seed=1, dim=DIM):
    """q, k, v and dout of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [[torch.randn(n, h, dim, generator=generator, dtype=torch.float64) for h in counts] for n in lengths]


def error(heads, lengths, run, dtype=torch.float64, device="cpu", dim=DIM):
    """Largest relative error of output and gradients of `run(q, k, v)` against attention's definition in float64."""
    *leaves, weight = (torch.cat(x).to(device, dtype) for x in zip(*random_parts(lengths, heads, 1, dim), strict=True))
    leaves = [x.requires_grad_() for x in leaves]
    out = run(*leaves)
    got = [out, *torch.autograd.grad(out, leaves, weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    out = torch.cat([attention(*part, dim**-0.5)[0] for part in parts])
    return largest(got, [out, *torch.autograd.grad(out, exact, weight.double())])


def packed(lengths, kernel=None, device="cpu", dim=DIM, moved=0, scale=None):
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    cu[2:3] += moved
    longest = int(cu.diff().max())

    def run(q, k, v):
        row = kernel or choose_kernel(q.device, q.dtype, dim)
        return row.run(KernelCall(q, k, v, cu, tuple(cu.tolist()), longest, scale or dim**-0.5))

    return run


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("heads", HEADS)
def test_exact_up_to_rounding(heads, dtype, limit):
    for lengths in (LENGTHS, [1], [5], [16] * 6):
        assert error(heads, lengths, packed(lengths), dtype) < limit


def uncausal(call):
    cuts = call.cu_seqlens.tolist()
    parts = [
        scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in call[:3]), scale=call.scale, enable_gqa=True)
        for a, b in pairwise(cuts)
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)


def unpacked(call):
    whole = torch.tensor([0, len(call.q_THD)], dtype=torch.int32)
    return SDPA.run(call._replace(cu_seqlens=whole, segments=(0, len(call.q_THD))))


def tiled_groups(call):
    """Head h reads group h % G."""
    repeat = call.q_THD.shape[1] // call.k_TGD.shape[1]
    return SDPA.run(call._replace(k_TGD=call.k_TGD.repeat(1, repeat, 1), v_TGD=call.v_TGD.repeat(1, repeat, 1)))


@pytest.mark.parametrize(
    "mutant",
    [
        packed(LENGTHS, moved=1),
        packed(LENGTHS, moved=-1),
        packed(LENGTHS, scale=0.3),
        packed(LENGTHS, Kernel("uncausal", bool, SDPA.supports, uncausal)),
        packed(LENGTHS, Kernel("unpacked", bool, SDPA.supports, unpacked)),
        packed(LENGTHS, Kernel("tiled", bool, SDPA.supports, tiled_groups)),
    ],
    ids=["border later", "border earlier", "scale", "no causal mask", "no borders", "wrong head group"],
)
def test_mutants_are_caught(mutant):
    assert error((4, 2), LENGTHS, mutant) > 1e-3


def two_steps(parts, heads, slices, layout):
    """Forward and backward of two packs in which some sequences are cut: out, dq, dk, dv of each slice.

    Padding holds no number, and comes out as zero with gradients of zero.
    """
    lengths = [len(part[0]) for part in parts]
    cut = {piece.sequence: lengths[piece.sequence] for piece in slices[1]}
    store = PrefixStore(cut) if cut else None
    runs, found = [], {}
    for row in filter(None, slices):
        pack = build_pack(MicroBatch(tuple(row), (0,)), lambda i: np.zeros(lengths[i]), prefix=store, **layout)
        tensors = []
        for kind, count in enumerate((heads[0], heads[1], heads[1], heads[0])):
            t = torch.full((pack.num_padded_tokens, count, DIM), torch.nan, dtype=torch.float64)
            for piece, first in zip(row, pack.segments, strict=False):
                t[first : first + piece.length] = parts[piece.sequence][kind][piece.start : piece.stop]
            tensors.append(t)
        leaves = [t.requires_grad_() for t in tensors[:3]]
        runs.append((pack, leaves, packed_attention(*leaves, pack, 0, DIM**-0.5), tensors[3]))
    for pack, leaves, out, weight in reversed(runs):
        all_of = [out, *torch.autograd.grad(out, leaves, weight)]
        assert not any(t[pack.sequence_ids_T < 0].any() for t in all_of)
        for piece, first in zip(pack.slices, pack.segments, strict=False):
            found[piece] = [t[first : first + piece.length] for t in all_of]
    if store:
        store.check_empty()
    return found


@st.composite
def layouts(draw):
    """Lengths, one pack or two in which the later slices are, and how they are padded."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=2, max_size=5))
    first, second = [], []
    for index, length in enumerate(lengths):
        at = draw(st.integers(1, length))
        first.append(Slice(index, 0, at))
        second += [Slice(index, at, length)] if at < length else []
    layout = {"segment_multiple": draw(st.sampled_from([1, 4, 7])), "pack_multiple": draw(st.sampled_from([1, 5]))}
    return lengths, [draw(st.permutations(first)), draw(st.permutations(second))], layout


@given(layouts(), st.sampled_from(HEADS), st.data())
def test_no_sequence_ever_touches_another(drawn, heads, data):
    """Other numbers in one sequence: every output and gradient of all others stays the same to the last bit."""
    lengths, slices, layout = drawn
    parts = random_parts(lengths, heads)
    before = two_steps(parts, heads, slices, layout)
    victim = data.draw(st.integers(0, len(lengths) - 1))
    parts[victim] = random_parts(lengths, heads, 2)[victim]
    after = two_steps(parts, heads, slices, layout)
    for piece, found in after.items():
        same = all(torch.equal(a, b) for a, b in zip(before[piece], found, strict=True))
        assert same == (piece.sequence != victim)


@given(layouts(), st.sampled_from(HEADS))
def test_padding_is_left_alone(drawn, heads):
    """The tokens get what they get without it."""
    lengths, slices, layout = drawn
    parts = random_parts(lengths, heads)
    bare = two_steps(parts, heads, slices, {})
    for piece, found in two_steps(parts, heads, slices, layout).items():
        assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(bare[piece], found, strict=True))


def test_a_cpu_takes_the_exact_kernel_and_that_is_logged_once(caplog):
    choose_kernel.cache_clear()
    with caplog.at_level(logging.INFO, logger="evenload"):
        for _ in range(3):
            assert choose_kernel(torch.device("cpu"), torch.float32, 48) is SDPA
    assert [r.message for r in caplog.records] == ["packed attention on cpu, torch.float32, head dimension 48: sdpa"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", KERNELS, ids=[k.name for k in KERNELS])
@pytest.mark.parametrize("heads", HEADS)
def test_kernels_of_the_gpu(kernel, heads):
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    if not (kernel.supports(dtype, device, 64) and kernel.available()):
        pytest.skip(f"{kernel.name} is not there")
    assert error(heads, LENGTHS, packed(LENGTHS, kernel, device, 64), dtype, device, 64) < 1e-2


@pytest.mark.parametrize(
    "known", [("is_causal",), ("window_size", "scale", "enable_gqa")], ids=["torch 2.10", "torch 2.13"]
)
def test_torchs_varlen_kernel_is_asked_in_its_own_words(monkeypatch, known):
    """Whatever parameters this torch has, the call means causal attention at the asked scale, heads grouped."""
    monkeypatch.setattr(kernels, "_varlen_parameters", lambda: frozenset(known))

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, **more):
        assert set(more) == set(known)
        assert more.get("is_causal", False) or more["window_size"] == (-1, 0)
        return SDPA.run(KernelCall(q, k, v, cu_q, tuple(cu_q.tolist()), max_q, more.get("scale", q.shape[-1] ** -0.5)))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    row = next(k for k in KERNELS if k.name == "torch_varlen")
    assert error((4, 2), LENGTHS, packed(LENGTHS, row)) < 1e-12
    q, k, v = (torch.cat(x) for x in list(zip(*random_parts(LENGTHS, (4, 2)), strict=True))[:3])
    given, wanted = (packed(LENGTHS, kernel, scale=0.1)(q, k, v) for kernel in (row, SDPA))
    assert torch.allclose(given, wanted, rtol=0, atol=1e-13)
