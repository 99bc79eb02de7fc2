"""What all ranks send to all, against what each rank says of itself."""

import numpy as np
from evenload.core.experts.exact import exact_quotas
from evenload.core.experts.sources import received_by, sent_by, tokens_between
from hypothesis import given
from hypothesis import strategies as st

from .drawn_counts import counts, policies


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 0), (2, 0), (4, 0), (4, 2), (8, 2), (8, 4), (8, 1)]))
def test_it_is_what_every_rank_says(seed, sizes):
    ranks, node_ranks = sizes
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, (ranks, 2 * ranks)) * rng.integers(0, 2, 2 * ranks)
    quotas = np.array([rng.multinomial(tokens, rng.dirichlet(np.full(ranks, 0.3))) for tokens in counts.sum(axis=0)])
    wanted = [sent_by(rank, counts, quotas, node_ranks).sum(axis=0) for rank in range(ranks)]
    between = tokens_between(counts, quotas, node_ranks)
    np.testing.assert_array_equal(between, wanted)
    expected = [received_by(rank, counts, quotas, node_ranks).sum(axis=1) for rank in range(ranks)]
    np.testing.assert_array_equal(between.T, expected)


@given(counts(most_ranks=6, most_own=3), st.data())
def test_what_one_sends_the_other_receives_and_tokens_stay_as_near_as_they_can(c_RE, data):
    policy = data.draw(policies(c_RE))
    quotas_ER = exact_quotas(c_RE, policy)
    ranks, size = range(len(c_RE)), policy.node_ranks or len(c_RE)
    sent_RER = np.stack([sent_by(rank, c_RE, quotas_ER, size) for rank in ranks])
    received_RRE = np.stack([received_by(rank, c_RE, quotas_ER, size) for rank in ranks])
    np.testing.assert_array_equal(sent_RER.transpose(2, 0, 1), received_RRE)
    np.testing.assert_array_equal(sent_RER.sum(axis=2), c_RE)
    np.testing.assert_array_equal(sent_RER.sum(axis=0), quotas_ER)
    for rank in ranks:
        np.testing.assert_array_equal(sent_RER[rank, :, rank], np.minimum(c_RE[rank], quotas_ER[:, rank]))
    for first in range(0, len(c_RE), size):
        node = slice(first, first + size)
        least = np.minimum(c_RE[node].sum(axis=0), quotas_ER[:, node].sum(axis=1))
        np.testing.assert_array_equal(sent_RER[node, :, node].sum(axis=(0, 2)), least)
