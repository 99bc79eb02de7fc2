"""Keys of 8 and 4 bits: each half a step off at most, attention within what follows from that, and the same samples
whatever they are computed next to."""

import hypothesis.strategies as st
import pytest
import torch
from evenload.core.plan.step_plan import Slice
from evenload.runtime.attention.block_tables import BlockTables
from evenload.runtime.attention.cached import cached_attention
from evenload.runtime.attention.kv_cache import CachedRows, KvCache
from evenload.runtime.attention.rounded_keys import restored_keys, rounded_keys
from evenload.runtime.attention.scores import ScoreForm
from hypothesis import given

HEADS, GROUPS, DIM, BLOCK = 4, 2, 8, 4
BITS = {"int8": 255, "int4": 15}


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10**6), st.sampled_from([*BITS]), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_rounded_key_is_half_a_step_off_at_most(seed, bits, dtype):
    """Tokens and heads of unlike sizes and means, and one that is constant."""
    x_TGD = drawn(seed, 5, GROUPS, DIM) * 10.0 ** drawn(seed + 1, 5, GROUPS, 1) + 3 * drawn(seed + 2, 5, GROUPS, 1)
    x_TGD[0, 0] = 7.5
    x_TGD = x_TGD.to(dtype)
    q, ranges = rounded_keys(x_TGD, bits)
    assert (q.dtype, q.shape[-1]) == (torch.uint8, DIM if bits == "int8" else DIM // 2)
    steps = (x_TGD.amax(-1).double() - x_TGD.amin(-1).double()) / BITS[bits]
    back = restored_keys(q, ranges, bits, ranges.dtype).double()
    room = 1e-14 if dtype == torch.float64 else 1e-5
    assert (
        (back - x_TGD.double()).abs() <= (steps * (0.5 + room) + room * x_TGD.double().abs().amax(-1))[..., None]
    ).all()
    torch.testing.assert_close(back[0, 0], torch.full((DIM,), 7.5, dtype=torch.float64), rtol=0, atol=0)


def attended(bits, slices, q_THD, of):
    """Attention of slices after keys that were written before, and the keys [T, G, D] of each sequence."""
    cache = KvCache(BlockTables(BLOCK), bits)
    for piece in slices:
        cache.tables.grow(piece.sequence, piece.stop)
    cpu = torch.device("cpu")
    for begin in (True, False):
        parts = [Slice(one.sequence, 0, one.start) if begin else one for one in slices]
        rows = CachedRows.of(cache, [one for one in parts if one.length], cpu)
        k, v = (torch.cat([x[one.sequence][one.start : one.stop] for one in rows.slices]) for x in of)
        q = torch.zeros(len(k), HEADS, DIM, dtype=k.dtype) if begin else q_THD
        out = cached_attention(q, k, v, rows, 0, ScoreForm(DIM**-0.5))
    return rows.slices, out


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("even", [False, True])
def test_attention_is_off_by_no_more_than_its_keys_let_it(bits, even):
    """|o - o~| <= (e^(2 eps) - 1) max |v| + half a step of v, eps the largest error of a score."""
    lengths = (21, 20, 22) if even else (3, 40, 17)
    slices = [Slice(0, lengths[0] - 1, lengths[0]), Slice(1, lengths[1] - 3, lengths[1]), Slice(2, 0, lengths[2])]
    slices = slices[:2] if even else slices
    k, v = ([drawn(seed + n, n, GROUPS, DIM) for n in lengths] for seed in (0, 100))
    q_THD = drawn(7, sum(one.length for one in slices), HEADS, DIM)
    order, exact = attended(None, slices, q_THD, (k, v))
    same, got = attended(bits, slices, q_THD, (k, v))
    assert order == same
    end, worst = 0, 0.0
    for piece in order:
        begin, end = end, end + piece.length
        steps_k, steps_v = (
            ((x[piece.sequence].amax(-1) - x[piece.sequence].amin(-1)) / BITS[bits]).repeat_interleave(
                HEADS // GROUPS, 1
            )
            for x in (k, v)
        )
        eps_NH = DIM**-0.5 * q_THD[begin:end].abs().sum(-1) * steps_k.amax(0) / 2
        largest_H = v[piece.sequence].abs().amax((0, 2)).repeat_interleave(HEADS // GROUPS)
        bound_NH = (2 * eps_NH).expm1() * largest_H + steps_v.amax(0) / 2
        error_NH = (got[begin:end] - exact[begin:end]).abs().amax(-1)
        assert (error_NH <= bound_NH).all()
        worst = max(worst, float((error_NH / bound_NH).max()))
    assert worst > 0.01, "a bound that is near enough to see a fault"
    assert (got - exact).abs().max() > 1e-6


def test_a_block_is_copied_with_its_steps():
    cache, cpu = KvCache(BlockTables(BLOCK), "int4"), torch.device("cpu")
    cache.tables.grow(0, BLOCK)
    k = drawn(0, BLOCK, GROUPS, DIM)
    pools = cache.write(0, CachedRows.of(cache, [Slice(0, 0, BLOCK)], cpu), k, 2 * k)
    cache.tables.grow(1, 3 * BLOCK)
    cache.copy_block(cache.tables[0][0], cache.tables[1][2])
    cache.tables.grow(2, 1)
    again = cache.write(0, CachedRows.of(cache, [Slice(2, 0, 1)], cpu), k[:1], k[:1])
    for before, after in zip(pools, again, strict=True):
        assert torch.equal(before[0], after[cache.tables[1][2]])
        assert before[0].abs().sum() > 0
