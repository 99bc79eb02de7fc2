"""What all ranks send to all, against what each rank says of itself."""

from __future__ import annotations

import numpy as np
import pytest
from evenload.core.experts.sources import sent_by, tokens_between
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 0), (2, 0), (4, 0), (4, 2), (8, 2), (8, 4), (8, 1)]))
def test_it_is_what_every_rank_says(seed: int, sizes: tuple[int, int]) -> None:
    ranks, node_ranks = sizes
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, (ranks, 2 * ranks)) * rng.integers(0, 2, 2 * ranks)
    quotas = np.array([rng.multinomial(tokens, rng.dirichlet(np.full(ranks, 0.3))) for tokens in counts.sum(axis=0)])
    wanted = [sent_by(rank, counts, quotas, node_ranks).sum(axis=0) for rank in range(ranks)]
    np.testing.assert_array_equal(tokens_between(counts, quotas, node_ranks), wanted)


@pytest.mark.parametrize("node_ranks", [0, 2])
def test_nothing_is_sent_where_nothing_is_routed(node_ranks: int) -> None:
    nothing = np.zeros((4, 8), dtype=np.int64)
    assert not tokens_between(nothing, nothing.T, node_ranks).any()
