"""Attention in a pack whose segments continue each other: a row gets what it gets alone, and its gradients add up."""

from itertools import accumulate

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.trie import Branching, trie_of
from evenload.runtime.attention.attention import packed_attention
from evenload.runtime.attention.pack import Pack
from harness.attention import attention
from harness.attention import error as largest
from harness.tries import BY_HAND, rows_of, tries
from hypothesis import given
from hypothesis import strategies as st

SCALE, DIM = 0.3, 8
HEADS = [(4, 4), (4, 2), (4, 1)]


def pack_of(branching: Branching, segments: tuple[int, ...] | None = None) -> Pack:
    borders = segments or tuple(accumulate(branching.lengths, initial=0))
    empty_T = torch.zeros(borders[-1], dtype=torch.int64)
    return Pack.of(
        branching.lengths,
        borders,
        tokens_T=empty_T,
        labels_T=empty_T,
        positions_T=empty_T,
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        num_targets=0,
        slices=(),
        branching=branching,
    )


def leaves(count, heads, dtype=torch.float64, dim=DIM):
    generator = torch.Generator().manual_seed(count)
    drawn = [torch.randn(count, h, dim, generator=generator, dtype=torch.float64) for h in (heads[0], *2 * heads[1:])]
    return [x.to(dtype).requires_grad_() for x in drawn]


def alone(q, k, v, trie, sinks_H, **how):
    """Outputs of the rows one by one, by the definition of attention."""
    rows = map(torch.from_numpy, trie.slots)
    return [attention(q[row], k[row], v[row], SCALE, sinks_H=sinks_H, **how)[0] for row in rows]


def together(q, k, v, trie, sinks_H, **how):
    """Those of the pack, where the rows read them."""
    out = packed_attention(q, k, v, pack_of(trie.branching), 0, SCALE, sinks_H=sinks_H, **how)
    return [out[torch.from_numpy(row)] for row in trie.slots]


def error(rows, heads, *, worth=0, sinks=False, **how):
    """Largest relative error of outputs and of gradients of q, k, v and sinks."""
    trie, found = trie_of(rows, worth), []
    for attend in (together, alone):
        own = leaves(trie.num_tokens, heads)
        sinks_H = torch.linspace(-1.0, 2.0, heads[0], dtype=torch.float64).requires_grad_() if sinks else None
        outs = attend(*own, trie, sinks_H, **how)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outs]
        sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
        found.append([torch.cat(outs).detach(), *(x.grad for x in own), *([sinks_H.grad] if sinks else [])])
    return largest(*found)


@pytest.mark.parametrize("how", [{}, {"window": 2}, {"softcap": 0.5, "sinks": True}], ids=str)
@pytest.mark.parametrize("name", BY_HAND)
def test_rows_by_hand_get_what_they_get_alone(name, how):
    assert error(rows_of(BY_HAND[name]), (4, 2), **how) < 1e-12


@given(
    tries(),
    st.sampled_from(HEADS),
    st.none() | st.integers(0, 45),
    st.sampled_from([None, 0.5, 3.0]),
    st.booleans(),
    st.sampled_from([0, 16]),
)
def test_rows_that_begin_alike_get_what_they_get_alone(rows, heads, window, softcap, sinks, worth):
    assert error(rows, heads, worth=worth, window=window, softcap=softcap, sinks=sinks) < 1e-12


def test_bfloat16_within_its_rounding():
    """A trunk of 96 and eight branches: outputs and gradients err no more than twice what rows alone do."""
    trunk = [1] * 96
    rows = rows_of([[*trunk, *[leaf] * (16 + 8 * leaf)] for leaf in range(2, 10)])
    trie, heads, found = trie_of(rows), (4, 2), {}
    for name, dtype, branching in (
        ("exact", torch.float64, trie.branching),
        ("shared", torch.bfloat16, trie.branching),
        ("rows", torch.bfloat16, None),
    ):
        own = [x.bfloat16().to(dtype).detach().requires_grad_() for x in leaves(trie.num_tokens, heads, dim=32)]
        places = [torch.from_numpy(row) for row in trie.slots]
        if branching is None:
            flat = Branching(tuple(map(len, rows)), (-1,) * len(rows))
            at = torch.cat(places)
            out = packed_attention(*(x[at] for x in own), pack_of(flat), 0, SCALE)
        else:
            out = packed_attention(*own, pack_of(branching), 0, SCALE)[torch.cat(places)]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        out.backward(weight.to(dtype))
        found[name] = [out.detach(), *(x.grad for x in own)]
    shared, apart = (largest(found[name], found["exact"]) for name in ("shared", "rows"))
    assert shared < 1e-2
    assert shared < 2 * apart


def test_padding_is_left_alone():
    """It holds no number, comes out as 0, and gets gradients of 0; the tokens get what they get without it."""
    branching, heads = Branching((3, 2, 2), (-1, 0, 0)), (4, 2)
    bare, weight = leaves(7, heads), torch.randn(7, 4, DIM, generator=torch.Generator().manual_seed(1)).double()
    pack = pack_of(branching, (0, 4, 6, 9))
    real = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    padded = [torch.full((9, *x.shape[1:]), torch.nan, dtype=x.dtype).index_copy(0, real, x.detach()) for x in bare]
    padded = [x.requires_grad_() for x in padded]
    out, wanted = (packed_attention(*x, p, 0, SCALE) for x, p in ((padded, pack), (bare, pack_of(branching))))
    grads = torch.autograd.grad(out, padded, torch.zeros_like(out).index_copy(0, real, weight))
    for found, right in zip([out, *grads], [wanted, *torch.autograd.grad(wanted, bare, weight)], strict=True):
        assert torch.equal(found[real], right)
        assert not found[[3, 8]].any()


def test_dropout_is_refused_where_rows_share_tokens():
    branching = Branching((3, 2, 2), (-1, 0, 0))
    with pytest.raises(EvenloadError, match="dropout cannot be drawn where samples share a prefix"):
        packed_attention(*leaves(7, (4, 2)), pack_of(branching), 0, SCALE, dropout=0.1)
