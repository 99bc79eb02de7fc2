"""Rows of one token over blocks of a cache, against attention by its definition."""

import hypothesis.strategies as st
import torch
from evenload.core.plan.step_plan import Slice
from evenload.runtime.attention.block_tables import BlockTables
from evenload.runtime.attention.by_block import attend_rows
from evenload.runtime.attention.kv_cache import CachedRows, KvCache
from evenload.runtime.attention.scores import ScoreForm
from harness.attention import attention
from hypothesis import given

HEADS, GROUPS, DIM, BLOCK = 6, 2, 4, 4
CPU = torch.device("cpu")


def rows_of(lengths, prompt, ended):
    """Rows that share a prompt as far as it is whole, in a pool where others have ended; random keys and values."""
    cache = KvCache(BlockTables(BLOCK))
    tables = cache.tables
    tables.grow(-1, prompt)
    for row, length in enumerate(lengths):
        tables.fork(-1, row, min(prompt, length - 1))
    for end in range(BLOCK, max(lengths) + BLOCK, BLOCK):
        for row, length in enumerate(lengths):
            tables.grow(row, min(end, length))
        tables.grow(-2, min(end, ended))
    tables.free(-2)
    rows = CachedRows.of(cache, [Slice(row, n - 1, n) for row, n in enumerate(lengths)], CPU)
    new = torch.zeros(len(lengths), GROUPS, DIM, dtype=torch.float64)
    pools = cache.write(0, rows, new, new)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(len(pool)), dtype=torch.float64))
    return rows, pools


def by_definition(q_BHD, pools, rows, scores):
    out = []
    for q_HD, piece in zip(q_BHD, rows.slices, strict=True):
        blocks = rows.cache.tables[piece.sequence][: -(-piece.stop // BLOCK)]
        k, v = (pool[blocks].flatten(0, 1)[: piece.stop] for pool in pools)
        own = {"window": scores.window, "softcap": scores.softcap, "sinks_H": scores.sinks_H}
        out.append(attention(q_HD[None], k, v, scores.scale, **own)[0][0])
    return torch.stack(out)


FORMS = (
    {}, {"window": 5}, {"softcap": 1.5}, {"softcap": 1.0, "window": 3},
    {"sinks_H": torch.linspace(-2, 2, HEADS).double()},
)  # fmt: skip


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 20), st.integers(0, 120))
def test_rows_of_all_lengths_shared_prompts_and_free_blocks(lengths, prompt, ended):
    rows, pools = rows_of(lengths, prompt, ended)
    q_BHD = torch.randn(len(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for more in FORMS:
        scores = ScoreForm(0.7, **more)
        want = by_definition(q_BHD, pools, rows, scores)
        torch.testing.assert_close(attend_rows(q_BHD, pools, rows, scores), want, rtol=0, atol=1e-12)
        if not rows.are_even:
            assert rows.reads.num_in_place + len(rows.reads.gathered_E) == len(rows.reads.rows_P)


def test_half_precision_sums_in_float32():
    rows, pools = rows_of([1, 60, 3, 57, 20], 8, 0)
    q_BHD = torch.randn(5, HEADS, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64).bfloat16()
    halves = tuple(pool.bfloat16() for pool in pools)
    want = by_definition(q_BHD.double(), tuple(pool.double() for pool in halves), rows, ScoreForm(0.5))
    got = attend_rows(q_BHD, halves, rows, ScoreForm(0.5))
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 1e-2
