"""Every row of the block table against an explicit softmax in float64, alone and as a part of a larger softmax."""

import inspect
import logging
import sys
import types
from itertools import accumulate, pairwise

import pytest
import torch
from evenload.runtime.attention import blocks
from evenload.runtime.attention.blocks import BLOCKS, Inputs, choose_block, merge
from harness.cases import pairs
from hypothesis import given
from hypothesis import strategies as st

from .definition import attention, error

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


def test_blocks_of_different_rows_fit_together():
    q, k, v, dout = tensors(6, 20, 4, 2)
    x = Inputs(q, k, v, True, SCALE)
    first, last = (Inputs(q, k[a:b], v[a:b], b == 20, SCALE) for a, b in ((0, 9), (9, 20)))
    out, lse = merge(*ROWS["plain"].forward(first), *ROWS["torch_cpu"].forward(last))
    want = dense(q, k, v, dout, x.causal)
    dq, dk, dv = ROWS["torch_cpu"].backward(dout, first, out, lse)
    more, dk_last, dv_last = ROWS["plain"].backward(dout, last, out, lse)
    assert error([out, lse, dq + more, torch.cat([dk, dk_last]), torch.cat([dv, dv_last])], want) < 1e-13


WRONG_MERGES = {
    "unscaled": lambda out, lse, more, last: (out + more, torch.logaddexp(lse, last)),
    "averaged": lambda out, lse, more, last: ((out + more) / 2, torch.logaddexp(lse, last)),
    "first lse": lambda out, lse, more, last: (merge(out, lse, more, last)[0], lse),
    "last lse": lambda out, lse, more, last: (merge(out, lse, more, last)[0], last),
}


@pytest.mark.parametrize("name", WRONG_MERGES)
def test_wrong_merges_are_caught(name):
    q, k, v, dout = tensors(6, 20, 4, 2)
    found = in_blocks(ROWS["torch_cpu"], Inputs(q, k, v, True, SCALE), [14, 6], WRONG_MERGES[name])(dout)
    assert error([found[0], *found[2:]], dense(q, k, v, dout, causal=True)[:1] + dense(q, k, v, dout, True)[2:]) > 1e-2


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


def test_the_plain_row_goes_over_its_queries_piecewise(monkeypatch):
    q, k, v, dout = tensors(30, 50, 4, 2)
    monkeypatch.setattr(blocks, "_SCORES", 4 * 50 * 7)
    x = Inputs(q, k, v, True, SCALE)
    out, lse = ROWS["plain"].forward(x)
    found = [out, lse, *ROWS["plain"].backward(dout, x, out, lse)]
    assert error(found, dense(q, k, v, dout, causal=True)) < 1e-13


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


def flash_attn_stand_in():
    """flash_attn's own functions, as of 2.7, on top of the plain row."""
    plain = ROWS["plain"]

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        assert return_softmax is False
        out, lse = plain.forward(Inputs(q[0], k[0], v[0], causal, softmax_scale))
        return out[None], lse[None], torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        assert softmax_lse.is_contiguous()
        assert softmax_lse.shape == (1, q.shape[2], q.shape[1])
        assert deterministic is False
        x = Inputs(q[0], k[0], v[0], causal, softmax_scale)
        for place, grad in zip((dq, dk, dv), plain.backward(dout[0], x, out[0], softmax_lse[0]), strict=True):
            assert place.is_contiguous()
            place[0] = grad
        return torch.empty(0)

    return types.SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def torch_stand_in(monkeypatch):
    """torch's own operators: arguments are bound to their real schemas, the work is done by the plain row."""
    plain = ROWS["plain"]

    def forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug, *, scale):
        assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, query.shape[1], key.shape[1])
        assert (dropout_p, debug) == (0.0, False)
        out, lse = plain.forward(Inputs(query[0], key[0], value[0], is_causal, scale))
        return out[None], lse[None], torch.empty(2), torch.empty(0), torch.empty(0)

    def backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale,
    ):  # fmt: skip
        assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, query.shape[1], key.shape[1])
        assert dropout_p == 0.0
        assert logsumexp.is_contiguous()
        x = Inputs(query[0], key[0], value[0], is_causal, scale)
        return tuple(grad[None] for grad in plain.backward(grad_out[0], x, out[0], logsumexp[0]))

    for name, stand_in in (("_flash_attention_forward", forward), ("_flash_attention_backward", backward)):
        known = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
        assert [p for p in inspect.signature(stand_in).parameters if p not in known] in ([], ["debug"])
        monkeypatch.setattr(torch.ops.aten, name, stand_in)


@pytest.mark.parametrize("name", ["flash_attn", "torch_flash"])
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_the_gpu_rows_ask_in_their_libraries_words(monkeypatch, name, heads, groups):
    if name == "flash_attn":
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn_stand_in())
    else:
        torch_stand_in(monkeypatch)
    q, k, v, dout = tensors(7, 20, heads, groups)
    for lengths in ([20], [9, 11]):
        found = in_blocks(ROWS[name], Inputs(q, k, v, True, SCALE), lengths)(dout)
        assert error(found, dense(q, k, v, dout, causal=True)) < 1e-13


def test_torchs_flash_operators_know_our_arguments():
    """Without CUDA there is no kernel behind them, but a call that did not fit would fail earlier and otherwise."""
    q, k, v, dout = tensors(7, 20, 4, 2, torch.bfloat16)
    x = Inputs(q, k, v, True, SCALE)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        ROWS["torch_flash"].forward(x)
    with pytest.raises(NotImplementedError, match="_flash_attention_backward"):
        ROWS["torch_flash"].backward(dout, x, q, torch.zeros(4, 7))


def test_the_choice_on_a_cpu_and_that_it_is_logged_once(caplog):
    choose_block.cache_clear()
    with caplog.at_level(logging.INFO, logger="evenload"):
        for _ in range(3):
            assert choose_block(torch.device("cpu"), torch.float64, 24).name == "torch_cpu"
    assert [r.message for r in caplog.records] == [
        "attention by blocks on cpu, torch.float64, head dimension 24: torch_cpu"
    ]


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
