"""Every row of the block table against an explicit softmax in float64, alone and as a part of a larger softmax."""

from itertools import accumulate, pairwise

import pytest
import torch
from evenload.runtime.attention.blocks import BLOCKS, Inputs, choose_block, merge
from harness.attention import attention, error
from harness.cases import pairs
from hypothesis import given
from hypothesis import strategies as st

ROWS = {row.name: row for row in BLOCKS}
ON_CPU = [row for row in BLOCKS if row.name in ("torch_cpu", "plain")]
SHAPES = [(1, 1, True), (5, 5, True), (1, 9, True), (7, 30, True), (40, 12, False), (300, 700, True), (3, 700, False)]
LIMITS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 1e-2}
HEADS = [(4, 4), (4, 2), (4, 1)]
DIM = 16
SCALE = 0.3


def tensors(queries, keys, heads, groups, dtype=torch.float64, device="cpu", dim=DIM):
    """q, K, V and dout."""
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(queries, heads), (keys, groups), (keys, groups), (queries, heads)]
    made = [torch.randn(*shape, dim, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(device, dtype) for t in made]


def dense(q, k, v, dout, causal, scale=SCALE):
    """out, lse, dq, dk, dv by the definition, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = attention(*leaves, scale, causal=causal)
    return [out, lse, *torch.autograd.grad((out * dout.double()).sum(), leaves)]


@pairs(
    ("name", [row.name for row in ON_CPU]),
    ("dtype", LIMITS),
    ("heads, groups", HEADS),
    ("queries, keys, causal", SHAPES),
)
def test_a_block_alone(name, dtype, heads, groups, queries, keys, causal):
    row = ROWS[name]
    assert row.supports(dtype, torch.device("cpu"), DIM)
    q, k, v, dout = tensors(queries, keys, heads, groups, dtype)
    x = Inputs(q, k, v, causal, SCALE)
    out, lse = row.forward(x)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    grads = row.backward(dout, x, out, lse)
    assert [g.dtype for g in grads] == [dtype] * 3
    assert error([out, lse, *grads], dense(q, k, v, dout, causal)) < LIMITS[dtype]


@st.composite
def splits(draw):
    """Heads, queries, and the lengths of blocks of keys: the last one causal and as long as the queries at least."""
    queries = draw(st.integers(1, 20))
    before = draw(st.lists(st.integers(1, 20), max_size=4))
    return draw(st.sampled_from(HEADS)), queries, [*before, queries + draw(st.integers(0, 5))]


def in_blocks(row, x, lengths, join=merge):
    """Forward and backward over blocks of keys, each a view of the whole; all but the last without a mask."""
    borders = list(accumulate(lengths, initial=0))
    parts = [
        x._replace(k_MGD=x.k_MGD[a:b], v_MGD=x.v_MGD[a:b], causal=x.causal and b == borders[-1])
        for a, b in pairwise(borders)
    ]
    out, lse = row.forward(parts[0])
    for part in parts[1:]:
        out, lse = join(out, lse, *row.forward(part))

    def backward(dout):
        dqs, dks, dvs = zip(*(row.backward(dout, part, out, lse) for part in parts), strict=True)
        return [out, lse, sum(dqs), torch.cat(dks), torch.cat(dvs)]

    return backward


@given(splits())
def test_blocks_put_together_are_one_softmax(split):
    (heads, groups), queries, lengths = split
    q, k, v, dout = tensors(queries, sum(lengths), heads, groups)
    for row in ON_CPU:
        found = in_blocks(row, Inputs(q, k, v, True, SCALE), lengths)(dout)
        assert error(found, dense(q, k, v, dout, causal=True)) < 1e-13


WRONG_MERGES = {
    "unscaled": lambda out, lse, more, last: (out + more, torch.logaddexp(lse, last)),
    "averaged": lambda out, lse, more, last: ((out + more) / 2, torch.logaddexp(lse, last)),
    "first lse": lambda out, lse, more, last: (merge(out, lse, more, last)[0], lse),
    "last lse": lambda out, lse, more, last: (merge(out, lse, more, last)[0], last),
}


@pytest.mark.parametrize("name", WRONG_MERGES)
def test_wrong_merges_are_caught(name):
    q, k, v, dout = tensors(6, 20, 4, 2)
    out, _, *grads = in_blocks(ROWS["torch_cpu"], Inputs(q, k, v, True, SCALE), [14, 6], WRONG_MERGES[name])(dout)
    wanted, _, *wanted_grads = dense(q, k, v, dout, causal=True)
    assert error([out, *grads], [wanted, *wanted_grads]) > 1e-2


def test_merging_with_no_keys_changes_nothing():
    q, k, v, _ = tensors(3, 5, 4, 2)
    out, lse = ROWS["plain"].forward(Inputs(q, k, v, True, SCALE))
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for found in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)
    assert not merge(*nothing, *nothing)[0].any()


def test_merging_survives_scores_far_apart():
    q, k, v, dout = tensors(4, 12, 4, 2, torch.float32)
    k = torch.cat([k[:6] * 100, k[6:]])
    found = in_blocks(ROWS["torch_cpu"], Inputs(q, k, v, True, 1.0), [8, 4])(dout)
    assert all(t.isfinite().all() for t in found)
    assert error(found[:1], dense(q, k, v, dout, True, 1.0)[:1]) < 1e-5


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: row.name)
def test_strides_of_any_kind(row):
    """Keys that are views into a larger buffer, queries out of a joint projection, an lse cut out of a larger one."""
    q, k, v, dout = tensors(6, 20, 4, 2)
    want = dense(q, k, v, dout, causal=True)
    q = torch.cat([q, q], dim=1)[:, :4]
    k, v = (torch.cat([t, t])[:20] for t in (k, v))
    x = Inputs(q, k, v, True, SCALE)
    out, lse = row.forward(x)
    wide = torch.cat([lse, lse, lse], dim=1)[:, 6:12]
    assert error([out, wide, *row.backward(dout, x, out, wide)], want) < 1e-13


def test_asking_for_rows_never_fails(monkeypatch, tmp_path, caplog):
    for row in BLOCKS:
        assert row.available() in (True, False)
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not ROWS["flash_attn"].available()
    assert "cannot be imported" in caplog.text
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    assert not ROWS["torch_cpu"].available()
    choose_block.cache_clear()
    assert choose_block(torch.device("cpu"), torch.float32, 40).name == "plain"
    choose_block.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("row", BLOCKS, ids=lambda row: row.name)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("lengths", [[300], [200, 100], [1, 3000, 700]])
def test_rows_of_the_gpu(row, heads, groups, lengths):
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    if not (row.supports(dtype, device, 64) and row.available()):
        pytest.skip(f"{row.name} is not there")
    q, k, v, dout = tensors(lengths[-1], sum(lengths), heads, groups, dtype, device, 64)
    found = in_blocks(row, Inputs(q, k, v, True, SCALE), lengths)(dout)
    assert error(found, dense(q, k, v, dout, causal=True)) < 1e-2
