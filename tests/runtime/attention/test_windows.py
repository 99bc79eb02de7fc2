"""Sliding windows, soft caps, sinks, values of another width, and dropout: packed attention against its definition in
float64."""

from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention import blocks, kernels
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.blocks import choose_block
from evenload.runtime.attention.kernels import choose_kernel
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.prefix import PrefixStore
from evenload.runtime.world.plane import Plane
from harness.attention import attention
from harness.attention import error as largest
from hypothesis import given
from hypothesis import strategies as st

HEADS, GROUPS, SCALE = 4, 2, 0.3


def samples(lengths, width, wide):
    """Leaves q, k, v and a weight of the output, for each sample."""
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = (HEADS, width), (GROUPS, width), (GROUPS, wide), (HEADS, wide)
    rows = [[torch.randn(n, *shape, generator=generator, dtype=torch.float64) for shape in shapes] for n in lengths]
    return [[*(x.requires_grad_() for x in row[:3]), row[3]] for row in rows]


def parts_of(length, pieces):
    return list(pairwise(sorted({i * length // pieces for i in range(pieces + 1)})))


def run(rows, pieces, **how):
    """Outputs and gradients where each sample is cut into so many pieces, the k-th of all samples in pack k."""
    lengths = [len(row[0]) for row in rows]
    cuts = [parts_of(n, p) for n, p in zip(lengths, pieces, strict=True)]
    cut = {i: n for i, n in enumerate(lengths) if len(cuts[i]) > 1}
    store = PrefixStore(cut) if cut else None
    outs, losses = [[] for _ in rows], []
    for step in range(max(map(len, cuts))):
        slices = tuple(Slice(i, *cuts[i][step]) for i in range(len(rows)) if step < len(cuts[i]))
        pack = build_pack(MicroBatch(slices, (0,)), lambda i: np.zeros(lengths[i], dtype=np.int64), prefix=store)
        q, k, v, weight = (torch.cat([rows[s.sequence][x][s.start : s.stop] for s in slices]) for x in range(4))
        out = packed_attention(q, k, v, pack, 1, SCALE, **how)
        losses.append((out * weight).sum())
        for piece, part in zip(slices, torch.split(out.detach(), [s.length for s in slices]), strict=True):
            outs[piece.sequence].append(part)
    for loss in reversed(losses):
        loss.backward()
    if store is not None:
        store.check_empty()
    return [torch.cat(out) for out in outs], [x.grad for row in rows for x in row[:3]]


@contextmanager
def small_blocks():
    """Inside, a sample has more than one block of queries."""
    before = kernels._ROWS, blocks._WINDOW_ROWS, blocks._SCORES
    kernels._ROWS, blocks._WINDOW_ROWS, blocks._SCORES = 3, 3, 200
    try:
        yield
    finally:
        kernels._ROWS, blocks._WINDOW_ROWS, blocks._SCORES = before


def error(lengths, pieces, window, *, widths=(8, 8), softcap=None, sinks=False, changed=()):
    """Largest relative error of outputs and gradients, those of the sinks too; ``changed``: what packs are given."""
    found, wanted = [], []
    for errors in (found, wanted):
        rows, sinks_H = samples(lengths, *widths), torch.linspace(-1.0, 2.0, HEADS, dtype=torch.float64)
        how = {"window": window, "softcap": softcap, "sinks_H": sinks_H.requires_grad_() if sinks else None}
        if errors is found:
            outs, grads = run(rows, pieces, **how | dict(changed))
        else:
            outs = [attention(*row[:3], SCALE, **how)[0] for row in rows]
            sum((out * row[3]).sum() for out, row in zip(outs, rows, strict=True)).backward()
            grads = [x.grad for row in rows for x in row[:3]]
        errors += [*(out.detach() for out in outs), *grads, *([sinks_H.grad] if sinks else [])]
    return largest(found, wanted)


SAMPLES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4)
"""Lengths, and the number of pieces that each is cut into."""
WINDOWS = st.none() | st.integers(0, 45)


@given(SAMPLES, WINDOWS, st.sampled_from([None, 0.5, 3.0]), st.booleans())
def test_soft_caps_and_sinks_are_exact_for_whole_and_cut_samples(drawn, window, softcap, sinks):
    with small_blocks():
        assert error(*zip(*drawn, strict=True), window, softcap=softcap, sinks=sinks) < 1e-12


@given(SAMPLES, WINDOWS, st.sampled_from([(8, 8), (12, 8), (4, 8)]))
def test_windows_and_widths_are_exact_for_whole_and_cut_samples(drawn, window, widths):
    with small_blocks():
        assert error(*zip(*drawn, strict=True), window, widths=widths) < 1e-12


@pytest.mark.parametrize(
    "change",
    [{"softcap": None}, {"softcap": 0.6}, {"sinks_H": torch.zeros(HEADS).double()}, {"window": None}, {"window": 5}],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_proof_catches_what_is_left_out_or_another(change, pieces):
    assert error([20], [pieces], 4, softcap=0.5, sinks="sinks_H" not in change, changed=change) > 1e-2


def test_the_proof_catches_a_window_that_ends_with_its_slice():
    (row,) = samples([20], 8, 8)
    wanted = [attention(*row[:3], SCALE, window=4)[0]]
    cut = [torch.cat([attention(*(x[a:b] for x in row[:3]), SCALE, window=4)[0] for a, b in parts_of(20, 3)])]
    assert largest(cut, wanted) > 1e-2


def test_kernels_without_windows_are_not_chosen_for_them():
    cpu = torch.device("cpu")
    assert choose_block(cpu, torch.float64, 8).name == "torch_cpu"
    assert choose_block(cpu, torch.float64, 8, frozenset({"window"})).name == "plain"
    assert choose_kernel(cpu, torch.float64, 8, frozenset({"window", "dropout"})).name == "sdpa"


def test_a_ring_refuses_windows():
    plane = Plane(None, (0, 1), 0)
    micro_batch = MicroBatch((Slice(0, 0, 8),), (0, 1), cp_comm="p2p")
    pack = build_pack(micro_batch, lambda _: np.zeros(8, dtype=np.int64), plane=plane)
    q, k, v = (torch.zeros(4, heads, 8) for heads in (HEADS, GROUPS, GROUPS))
    with pytest.raises(EvenloadError, match="sliding window"):
        packed_attention(q, k, v, pack, 1, SCALE, window=2)


@pytest.mark.parametrize("window", [None, 5])
def test_dropout_keeps_its_share_of_the_weights_and_their_sum(window):
    length, share = 64, 0.25
    torch.manual_seed(1)
    q, k = (torch.randn(length, 2, length, dtype=torch.float64) for _ in range(2))
    v = torch.eye(length, dtype=torch.float64)[:, None].expand(-1, 2, -1).contiguous()
    pack = build_pack(MicroBatch((Slice(0, 0, length),), (0,)), lambda _: np.zeros(length, dtype=np.int64))
    whole, drawn = (packed_attention(q, k, v, pack, 1, 0.1, window=window, dropout=p) for p in (0.0, share))
    seen, kept = whole > 0, drawn > 0
    assert not (kept & ~seen).any()
    assert torch.allclose(drawn[kept], whole[kept] / (1 - share))
    assert abs(1 - float(kept.sum() / seen.sum()) - share) < 0.05


def test_dropout_is_refused_where_a_sample_is_cut():
    with pytest.raises(EvenloadError, match="attention dropout"):
        run(samples([12], 8, 8), [2], dropout=0.1)
