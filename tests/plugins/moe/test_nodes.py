"""Copies between nodes: lawful on any counts, no longer than quotas that know no nodes, and priced as layers are."""

import numpy as np
import pytest
from evenload.core.experts.exact import most_tokens
from evenload.core.experts.quotas import at_home, check_quotas, copies_of, imbalance_of
from evenload.core.experts.seconds import LayerCost, copy_tokens, layer_seconds, paying_tokens
from evenload.core.experts.sources import tokens_between
from evenload.core.machine.cluster import Link
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.plugins.moe.clone import clone
from evenload.plugins.moe.nodes import price, wanted_by_nodes, with_local_copies
from hypothesis import assume, given
from hypothesis import strategies as st

from ...core.experts.drawn_counts import counts
from .popular import zipf

QWEN3 = LayerCost(
    forward_s=1.89e-3 / 65536,
    backward_s=2 * 1.89e-3 / 65536,
    token_bytes=8192.0,
    weight_bytes=6.0 * 4096 * 1536,
    gradient_bytes=6.0 * 4096 * 1536,
    intra=Link(latency_s=1e-5, bytes_per_s=6.4e11),
    inter=Link(latency_s=2e-5, bytes_per_s=5e10),
    node_ranks=8,
)


def policy_of(cost, own, rounds):
    tokens = round(copy_tokens(cost))
    return ExpertPolicy("clone", own + rounds, 1.0, int(paying_tokens(cost)), cost.node_ranks, cost.keep, tokens)


@given(counts(), st.data())
def test_any_policy_between_nodes_is_kept_on_any_counts(counts_RE, data):
    num_ranks, num_experts = counts_RE.shape
    own = num_experts // num_ranks
    sizes = [size for size in range(1, num_ranks) if num_ranks % size == 0]
    assume(sizes)
    policy = ExpertPolicy(
        "clone",
        slots=data.draw(st.integers(own, num_experts)),
        least_tokens=data.draw(st.sampled_from([0, 1, 7, 1000])),
        node_ranks=data.draw(st.sampled_from(sizes)),
        copy_tokens=data.draw(st.sampled_from([1, 5, 1000])),
    )
    quotas_ER = check_quotas(clone(counts_RE, policy, ()), counts_RE, policy, ())
    most = most_tokens(counts_RE.sum(), num_ranks, policy)
    assert quotas_ER.sum(axis=0).max() <= max(most, at_home(counts_RE, policy, ()).sum(axis=0).max())
    local_ER = with_local_copies(wanted_by_nodes(counts_RE, policy), policy)
    if local_ER is not None:
        np.testing.assert_array_equal(local_ER, quotas_ER)
        assert local_ER.sum(axis=0).max() <= most


def test_with_a_slot_for_every_expert_no_token_of_even_loads_leaves_its_node():
    counts_RE = np.full((4, 8), 100)
    policy = ExpertPolicy("clone", 6, node_ranks=2, copy_tokens=1)
    quotas_ER = clone(counts_RE, policy, ())
    between_RR = tokens_between(counts_RE, quotas_ER, 2)
    assert not between_RR[:2, 2:].any()
    assert not between_RR[2:, :2].any()
    assert imbalance_of(quotas_ER) == 1.0
    assert [len(experts) for experts in copies_of(quotas_ER)] == [2, 2, 2, 2]


def test_rounds_stop_where_copies_keep_fewer_tokens_than_they_take():
    """Both nodes want 800 tokens of two experts of the other and 8 of the rest; a copy takes as long as 100."""
    counts_RE = np.full((4, 8), 4)
    counts_RE[:2, [4, 6]] = counts_RE[2:, [0, 2]] = 400
    policy = ExpertPolicy("clone", 6, node_ranks=2, copy_tokens=100)
    assert copies_of(clone(counts_RE, policy, ())) == ((4,), (6,), (0,), (2,))
    assert with_local_copies(wanted_by_nodes(counts_RE, policy), policy._replace(copy_tokens=900)) is None


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("exponent", "rounds"), [(0.1, 2), (0.3, 4), (0.5, 12)])
def test_knowing_nodes_is_hardly_ever_longer_than_not_knowing_them(exponent, rounds, keep):
    cost = QWEN3._replace(keep=keep)
    policy = policy_of(cost, 2, rounds)
    for seed in range(3):
        counts_RE = zipf(seed, exponent, 64, 128)
        known, *others = (
            layer_seconds(counts_RE, check_quotas(clone(counts_RE, one, ()), counts_RE, one, ()), cost).total
            for one in (policy, policy._replace(copy_tokens=0), policy._replace(copy_tokens=0, node_ranks=0))
        )
        assert known <= 1.02 * min(others)


def test_copies_of_the_own_node_first_are_taken_where_experts_are_large_and_nodes_even():
    cost = QWEN3._replace(weight_bytes=4 * QWEN3.weight_bytes, gradient_bytes=4 * QWEN3.gradient_bytes)
    policy = policy_of(cost, 2, 0)
    base_RE = zipf(3, 0.5, 8, 16)
    counts_RE = np.tile(base_RE, (2, 2)) // 2
    assert (clone(counts_RE, policy, ()) == clone(counts_RE, policy._replace(copy_tokens=0), ())).all()
    assert imbalance_of(at_home(counts_RE, policy, ())) > 1.5 > imbalance_of(clone(counts_RE, policy, ()))


@pytest.mark.parametrize("exponent", [0.2, 0.5])
def test_a_price_is_the_seconds_of_the_layer_on_links_between_nodes(exponent):
    policy, counts_RE = policy_of(QWEN3, 2, 4), zipf(1, exponent, 64, 128)
    wanted_NE = wanted_by_nodes(counts_RE, policy)
    token_s = 4 * QWEN3.token_bytes / QWEN3.inter.bytes_per_s
    blind = policy._replace(copy_tokens=0, node_ranks=0)
    for quotas_ER in (at_home(counts_RE, policy, ()), clone(counts_RE, blind, ()), clone(counts_RE, policy, ())):
        priced_s = price(wanted_NE, [quotas_ER], policy)[0] / 2**20 * token_s
        assert priced_s == pytest.approx(layer_seconds(counts_RE, quotas_ER, QWEN3).total, rel=0.12)
