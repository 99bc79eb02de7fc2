"""Rows of a few tokens over blocks of a cache, against attention by its definition."""

import hypothesis.strategies as st
import torch
from evenload.core.plan.step_plan import Slice
from evenload.runtime.attention.block_tables import BlockTables
from evenload.runtime.attention.by_block import attend_rows
from evenload.runtime.attention.decode_rows import MOST_TOKENS
from evenload.runtime.attention.kv_cache import CachedRows, KvCache
from evenload.runtime.attention.scores import ScoreForm
from harness.attention import attention
from hypothesis import given

HEADS, GROUPS, DIM, BLOCK = 6, 2, 4, 4
CPU = torch.device("cpu")


def rows_of(lengths, prompt, ended, own=(1,)):
    """Rows of ``own`` tokens in turn that share a prompt as far as it is whole, in a pool where others have ended;
    random keys and values."""
    cache = KvCache(BlockTables(BLOCK))
    tables = cache.tables
    tables.grow(-1, prompt)
    slices = [Slice(row, max(0, n - own[row % len(own)]), n) for row, n in enumerate(lengths)]
    for piece in slices:
        tables.fork(-1, piece.sequence, min(prompt, piece.start))
    for end in range(BLOCK, max(lengths) + BLOCK, BLOCK):
        for row, length in enumerate(lengths):
            tables.grow(row, min(end, length))
        tables.grow(-2, min(end, ended))
    tables.free(-2)
    rows = CachedRows.of(cache, slices, CPU)
    new = torch.zeros(sum(piece.length for piece in slices), GROUPS, DIM, dtype=torch.float64)
    pools = cache.write(0, rows, new, new)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(len(pool)), dtype=torch.float64))
    return rows, pools


def queries_of(rows, seed=1):
    count = sum(piece.length for piece in rows.slices)
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(q_THD, pools, rows, scores):
    out, queries = [], iter(q_THD)
    own = {"window": scores.window, "softcap": scores.softcap, "sinks_H": scores.sinks_H}
    for piece in rows.slices:
        for stop in range(piece.start + 1, piece.stop + 1):
            blocks = rows.cache.tables[piece.sequence][: -(-stop // BLOCK)]
            k, v = (pool[blocks].flatten(0, 1)[:stop] for pool in pools)
            out.append(attention(next(queries)[None], k, v, scores.scale, **own)[0][0])
    return torch.stack(out)


def attended(q_THD, pools, rows, scores):
    """All rows, call by call."""
    assert not rows.long
    parts = torch.split(q_THD, [short.num_tokens for short in rows.short])
    calls = zip(rows.short, parts, strict=True)
    return torch.cat([short.taken(attend_rows(short.filled(q), pools, short, scores)) for short, q in calls])


FORMS = (
    {}, {"window": 5}, {"softcap": 1.5}, {"softcap": 1.0, "window": 3},
    {"sinks_H": torch.linspace(-2, 2, HEADS).double()},
)  # fmt: skip


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(0, 20),
    st.integers(0, 120),
    st.just([1]) | st.lists(st.integers(1, MOST_TOKENS), min_size=1, max_size=9),
)
def test_rows_of_all_lengths_shared_prompts_and_free_blocks(lengths, prompt, ended, own):
    rows, pools = rows_of(lengths, prompt, ended, own)
    q_THD = queries_of(rows)
    for more in FORMS:
        scores = ScoreForm(0.7, **more)
        want = by_definition(q_THD, pools, rows, scores)
        torch.testing.assert_close(attended(q_THD, pools, rows, scores), want, rtol=0, atol=1e-12)
        for short in rows.short:
            if not short.are_even:
                assert short.reads.num_in_place + len(short.reads.gathered_E) == len(short.reads.rows_P)


def test_rows_of_like_lengths_attend_in_one_call_and_long_slices_alone():
    cache = KvCache(BlockTables(BLOCK))
    lengths = [1, 17, 2, 16, 1, 4, 5, 40]
    for row, length in enumerate(lengths):
        cache.tables.grow(row, length)
    rows = CachedRows.of(cache, [Slice(row, 0, length) for row, length in enumerate(lengths)], CPU)
    assert [piece.length for piece in rows.long] == [17, 40]
    assert [[piece.length for piece in short.slices] for short in rows.short] == [[16, 5], [2, 4], [1, 1]]
    assert rows.positions_T.tolist() == [p for n in (17, 40, 16, 5, 2, 4, 1, 1) for p in range(n)]
    of = [piece.sequence for piece in rows.slices for _ in range(piece.length)]
    places = [(cache.tables[row][p // BLOCK], p % BLOCK) for row, p in zip(of, rows.positions_T.tolist(), strict=True)]
    assert [*map(tuple, rows.places_2T.T.tolist())] == places


def test_half_precision_sums_in_float32():
    rows, pools = rows_of([1, 60, 3, 57, 20], 8, 0, (1, 3))
    q_THD = queries_of(rows, 3).bfloat16()
    halves = tuple(pool.bfloat16() for pool in pools)
    want = by_definition(q_THD.double(), tuple(pool.double() for pool in halves), rows, ScoreForm(0.5))
    got = attended(q_THD, halves, rows, ScoreForm(0.5))
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 1e-2
