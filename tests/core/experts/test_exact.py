"""Exact loads in closed form: no rank over its share, few experts taken, of one other rank, from the node first."""

import numpy as np
from evenload.core.experts.exact import exact_far_and_near, exact_quotas, levelled, most_tokens
from evenload.core.experts.quotas import check_quotas, copies_of
from evenload.core.plan.expert_policy import ExpertPolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn_counts import counts, policies


@given(counts(), st.data())
@settings(max_examples=300)
def test_no_rank_is_over_its_share_and_each_takes_from_at_most_one_other(counts_RE, data):
    num_ranks, num_experts = counts_RE.shape
    own = num_experts // num_ranks
    policy = data.draw(policies(counts_RE))._replace(slots=own)
    quotas_ER = check_quotas(exact_quotas(counts_RE, policy), counts_RE, policy, ())
    mean = counts_RE.sum() / num_ranks
    assert quotas_ER.sum(axis=0).max() <= max(np.ceil(mean), policy.tolerance * mean)
    assert all(len({expert // own for expert in experts}) <= 1 for experts in copies_of(quotas_ER))


@given(counts())
def test_even_enough_loads_stay_at_home(counts_RE):
    num_ranks = len(counts_RE)
    policy = ExpertPolicy("exact", slots=counts_RE.shape[1], tolerance=float(num_ranks))
    assert not any(copies_of(exact_quotas(counts_RE, policy)))


def test_a_share_is_the_mean_rounded_up_or_the_tolerance_rounded_down():
    assert most_tokens(np.int64(10), 4, ExpertPolicy()) == 3
    assert most_tokens(np.int64(1000), 4, ExpertPolicy(tolerance=1.01)) == 252
    assert most_tokens(np.int64(3), 4, ExpertPolicy(tolerance=1.01)) == 1


def test_a_hot_expert_is_copied_by_all_that_have_room_and_by_no_other():
    loads_E = np.array([12, 0, 4, 0, 0, 0, 0, 0])
    quotas_ER = exact_quotas(loads_E[None].repeat(4, 0) * np.array([[1], [0], [0], [0]]), ExpertPolicy("exact", 2))
    assert quotas_ER[0].tolist() == [4, 0, 4, 4]
    assert quotas_ER[2].tolist() == [0, 4, 0, 0]


def test_ranks_take_from_their_node_first():
    """Nodes (0, 1) and (2, 3): each evens its own excess, and only what is left travels between them."""
    counts_RE = np.zeros((4, 4), dtype=np.int64)
    counts_RE[0] = [9, 1, 7, 3]
    assert copies_of(exact_quotas(counts_RE, ExpertPolicy("exact", 1, node_ranks=2))) == ((), (0,), (), (2,))


@given(counts())
def test_inside_nodes_of_enough_room_nothing_travels_between_them(counts_RE):
    """The same counts on every node: each has its mean within it."""
    twice_RE = np.tile(counts_RE, (2, 2))
    num_ranks, num_experts = twice_RE.shape
    policy = ExpertPolicy("exact", num_experts, tolerance=2.0, node_ranks=num_ranks // 2)
    for rank, experts in enumerate(copies_of(exact_quotas(twice_RE, policy))):
        assert all(e // (num_experts // 2) == rank // (num_ranks // 2) for e in experts)


@given(counts(), st.data())
def test_tokens_that_stand_anywhere_are_levelled_without_losing_one(counts_RE, data):
    """On every rank some tokens of any experts, as many experts on each."""
    num_ranks, num_experts = counts_RE.shape
    standing = data.draw(st.integers(1, num_experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    experts_RM = np.stack([rng.permutation(num_experts)[:standing] for _ in range(num_ranks)])
    tokens_RM = np.take_along_axis(counts_RE, experts_RM, axis=1)
    policy = ExpertPolicy("exact")
    quotas_ER = levelled(tokens_RM, experts_RM, num_experts, policy)
    np.testing.assert_array_equal(
        quotas_ER.sum(axis=1), np.bincount(experts_RM.ravel(), tokens_RM.ravel(), num_experts).astype(int)
    )
    assert quotas_ER.min() >= 0
    assert quotas_ER.sum(axis=0).max() <= most_tokens(tokens_RM.sum(), num_ranks, policy)


@given(counts(), st.data())
@settings(max_examples=300)
def test_quotas_that_know_nodes_and_those_that_know_none_come_together(counts_RE, data):
    num_ranks = len(counts_RE)
    size = data.draw(st.sampled_from([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
    policy = ExpertPolicy("exact", node_ranks=size)
    far_ER, near_ER = exact_far_and_near(counts_RE, policy)
    np.testing.assert_array_equal(far_ER, exact_quotas(counts_RE, policy._replace(node_ranks=0)))
    if size < num_ranks:
        np.testing.assert_array_equal(near_ER, exact_quotas(counts_RE, policy))
