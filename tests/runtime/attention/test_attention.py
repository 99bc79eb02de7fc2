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
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from . import definition

SDPA = KERNELS[-1]
LENGTHS = [1, 7, 1, 1, 30, 2, 64, 7]
HEADS = [(4, 4), (4, 2), (4, 1)]
DIM = 8


def inputs(heads, groups, lengths, dtype=torch.float64, device="cpu", dim=DIM):
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    tensors = [
        torch.randn(total, h, dim, generator=generator, dtype=torch.float64) for h in (heads, groups, groups, heads)
    ]
    q, k, v, weight = (t.to(device, dtype) for t in tensors)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), weight


def borders(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def dense(q_THD, k_TGD, v_TGD, lengths, scale):
    parts = zip(*(x.split(lengths) for x in (q_THD, k_TGD, v_TGD)), strict=True)
    return torch.cat([definition.attention(*part, scale)[0] for part in parts])


def error(heads, groups, lengths, run, dtype=torch.float64, device="cpu", dim=DIM):
    """Largest relative error of output and gradients of `run(q, k, v)` against `dense` in float64."""
    q, k, v, weight = inputs(heads, groups, lengths, dtype, device, dim)
    out = run(q, k, v)
    got = [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = dense(*exact, lengths, dim**-0.5)
    want = [out, *torch.autograd.grad((out * weight.double()).sum(), exact)]
    return definition.error(got, want)


def packed(lengths, kernel=None, device="cpu", dim=DIM, moved=0, scale=None):
    cu = borders(lengths, device)
    if moved:
        cu[2] += moved
    longest = int(cu.diff().max())

    def run(q, k, v):
        row = kernel or choose_kernel(q.device, q.dtype, dim)
        return row.run(KernelCall(q, k, v, cu, tuple(cu.tolist()), longest, scale or dim**-0.5))

    return run


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_exact_up_to_rounding(heads, groups, dtype, limit):
    for lengths in (LENGTHS, [1], [5], [16] * 6):
        assert error(heads, groups, lengths, packed(lengths), dtype) < limit


def test_strided_views_of_one_projection_are_taken_as_they_are():
    def run(q, k, v):
        joined = torch.cat([q, k, v], dim=1)
        return packed(LENGTHS)(*joined.split([4, 2, 2], dim=1))

    assert error(4, 2, LENGTHS, run) < 1e-13


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
    assert error(4, 2, LENGTHS, mutant) > 1e-3


def test_padding_at_the_end_of_a_segment_changes_no_real_token():
    lengths, pad_to = [3, 8, 1, 6], 9
    q, k, v, _ = inputs(4, 2, [pad_to] * 4)
    real = torch.cat([torch.arange(n) + i * pad_to for i, n in enumerate(lengths)])
    padded = packed([pad_to] * 4)(q, k, v)[real]
    assert torch.allclose(padded, packed(lengths)(q[real], k[real], v[real]), rtol=0, atol=1e-14)


def two_steps(parts, heads, slices, layout, rubbish=None):
    """Forward and backward of two packs in which some sequences are cut: out, dq, dk, dv of each slice.

    Args:
        parts: q, k, v and dout of each sequence.
        rubbish: what padding holds in q, k, v and dout; None: zeros.
    """
    lengths = [len(part[0]) for part in parts]
    cut = {piece.sequence: lengths[piece.sequence] for piece in slices[1]}
    store = PrefixStore(cut) if cut else None
    runs, found = [], {}
    for row in filter(None, slices):
        pack = build_pack(MicroBatch(tuple(row), (0,)), lambda i: np.zeros(lengths[i]), prefix=store, **layout)
        tensors = []
        for kind, count in enumerate((heads[0], heads[1], heads[1], heads[0])):
            t = torch.full(
                (pack.num_padded_tokens, count, DIM), 0.0 if rubbish is None else rubbish, dtype=torch.float64
            )
            for piece, first in zip(row, pack.segments, strict=False):
                t[first : first + piece.length] = parts[piece.sequence][kind][piece.start : piece.stop]
            tensors.append(t)
        leaves = [t.requires_grad_() for t in tensors[:3]]
        runs.append((pack, leaves, packed_attention(*leaves, pack, 0, DIM**-0.5), tensors[3]))
    for pack, leaves, out, weight in reversed(runs):
        all_of = [out, *torch.autograd.grad(out, leaves, weight)]
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


def random_parts(lengths, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [[torch.randn(n, h, DIM, generator=generator, dtype=torch.float64) for h in counts] for n in lengths]


@given(layouts(), st.sampled_from(HEADS), st.data())
def test_no_sequence_ever_touches_another(drawn, heads, data):
    """Other numbers in one sequence: every output and gradient of all others stays the same to the last bit."""
    lengths, slices, layout = drawn
    parts = random_parts(lengths, heads, 1)
    before = two_steps(parts, heads, slices, layout)
    victim = data.draw(st.integers(0, len(lengths) - 1))
    parts[victim] = random_parts(lengths, heads, 2)[victim]
    after = two_steps(parts, heads, slices, layout)
    for piece, found in after.items():
        same = all(torch.equal(a, b) for a, b in zip(before[piece], found, strict=True))
        assert same == (piece.sequence != victim)


@given(layouts(), st.sampled_from(HEADS))
def test_padding_is_left_alone(drawn, heads):
    """Whatever lies on padding, NaN included, the tokens get what they get without padding."""
    lengths, slices, layout = drawn
    parts = random_parts(lengths, heads, 1)
    bare = two_steps(parts, heads, slices, {})
    for piece, found in two_steps(parts, heads, slices, layout, rubbish=float("nan")).items():
        assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(bare[piece], found, strict=True))


def test_padding_comes_out_as_zero_with_gradients_of_zero():
    pack = build_pack(MicroBatch((Slice(0, 0, 3), Slice(1, 0, 2)), (0,)), lambda i: np.zeros(3), segment_multiple=4)
    q, k, v = (torch.randn(8, 2, DIM, requires_grad=True) for _ in range(3))
    out = packed_attention(q, k, v, pack, 0, 0.3)
    real = pack.sequence_ids_T >= 0
    assert real.tolist() == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert not out[~real].any()
    for grad in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert not grad[~real].any()


def test_the_cpu_always_takes_the_exact_kernel():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert choose_kernel(torch.device("cpu"), dtype, 64) is SDPA
        assert [k.name for k in KERNELS if k.supports(dtype, torch.device("cpu"), 64)] == ["sdpa"]


def test_the_choice_is_logged_once(caplog):
    choose_kernel.cache_clear()
    with caplog.at_level(logging.INFO, logger="evenload"):
        for _ in range(3):
            choose_kernel(torch.device("cpu"), torch.float32, 48)
    assert [r.message for r in caplog.records] == ["packed attention on cpu, torch.float32, head dimension 48: sdpa"]


def test_a_kernel_that_cannot_be_imported_is_passed_over_with_a_warning(caplog, tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not KERNELS[0].available()
    assert "flash_attn is installed but cannot be imported" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", KERNELS, ids=[k.name for k in KERNELS])
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_kernels_of_the_gpu(kernel, heads, groups):
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    if not (kernel.supports(dtype, device, 64) and kernel.available()):
        pytest.skip(f"{kernel.name} is not there")
    assert error(heads, groups, LENGTHS, packed(LENGTHS, kernel, device, 64), dtype, device, 64) < 1e-2


OLD_VARLEN = ("is_causal",)
NEW_VARLEN = ("window_size", "scale", "enable_gqa")


@pytest.mark.parametrize("known", [OLD_VARLEN, NEW_VARLEN], ids=["torch 2.10", "torch 2.13"])
def test_torchs_varlen_kernel_is_asked_in_its_own_words(monkeypatch, known):
    """Whatever parameters this torch has, the call means causal attention at the asked scale, heads grouped."""
    monkeypatch.setattr(kernels, "_varlen_parameters", lambda: frozenset(known))

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, **more):
        assert set(more) == set(known)
        assert more.get("is_causal", False) or more["window_size"] == (-1, 0)
        return SDPA.run(KernelCall(q, k, v, cu_q, tuple(cu_q.tolist()), max_q, more.get("scale", q.shape[-1] ** -0.5)))

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    row = next(k for k in KERNELS if k.name == "torch_varlen")
    assert error(4, 2, LENGTHS, packed(LENGTHS, row)) < 1e-12
    q, k, v, _ = inputs(4, 2, LENGTHS)
    given, wanted = (packed(LENGTHS, kernel, scale=0.1)(q, k, v) for kernel in (row, SDPA))
    assert torch.allclose(given, wanted, rtol=0, atol=1e-13)
