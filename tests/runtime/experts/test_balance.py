"""Slots instead of experts: every token of a rank goes to one slot of its expert, as all ranks expect it."""

import logging

import numpy as np
import pytest
import torch
from evenload.core.experts.quotas import at_home, copies_of
from evenload.core.plan.expert_policy import EXPERTS_AT_HOME, ExpertPolicy
from evenload.runtime.experts.balance import ExpertBalance, Shares
from hypothesis import given
from hypothesis import strategies as st

COUNTS_RE = np.array([[3, 0, 2, 1], [1, 4, 0, 0]])
QUOTAS_ER = np.array([[1, 3], [4, 0], [2, 0], [0, 1]])
POLICY = ExpertPolicy("drawn", slots=2)


def shares_of(place):
    return Shares(COUNTS_RE, QUOTAS_ER, copies_of(QUOTAS_ER), place, POLICY)


def test_slots_of_copies_stand_behind_the_experts_of_their_rank():
    assert copies_of(QUOTAS_ER) == ((2,), (0,))
    first, second = shares_of(0), shares_of(1)
    assert first.slots == 3
    # Own tokens stay: of expert 0, rank 0 keeps one, and sends two to rank 1's copy.
    assert first.counts_of_slots.tolist() == [[1, 0, 2, 0, 0, 0], [0, 4, 0, 0, 0, 0]]
    assert second.counts_of_slots.tolist() == [[0, 0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("place", [0, 1])
def test_tokens_go_to_the_slots_that_the_others_expect_them_in(place):
    rows = [expert for expert, count in enumerate(COUNTS_RE[place]) for _ in range(count)]
    chosen_TE = torch.nn.functional.one_hot(torch.tensor(rows), 4).bool()
    probs_TE = torch.rand(len(rows), 4, dtype=torch.float64, requires_grad=True)
    chosen_TS, probs_TS = shares_of(place).spread(chosen_TE, probs_TE)
    expected = [shares_of(rank).counts_of_slots[place] for rank in (0, 1)]
    assert chosen_TS.sum(dim=0).tolist() == sum(expected).tolist()
    assert chosen_TS.sum(dim=1).tolist() == [1] * len(rows)
    experts_S = torch.tensor([0, 1, 2, 2, 3, 0])
    assert (
        probs_TS[chosen_TS].tolist() == probs_TE[torch.arange(len(rows)), experts_S[chosen_TS.int().argmax(1)]].tolist()
    )
    probs_TS.sum().backward()
    assert torch.equal(probs_TE.grad, chosen_TE.double())


def test_a_planner_that_fails_or_breaks_a_law_leaves_experts_at_home(caplog):
    balance = ExpertBalance(0)
    for planner in (lambda *_: QUOTAS_ER + 1, lambda *_: 1 // 0):
        balance.begin(POLICY, planner)
        with caplog.at_level(logging.WARNING, logger="evenload"):
            assert balance.shares(3, COUNTS_RE) is None
        assert balance.checksum == 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "experts of layer 3 stay at home" in warning
    assert "lose tokens of an expert" in warning


def test_cut_experts_are_fetched_without_copies_and_behind_a_planner_that_fails_too():
    balance = ExpertBalance(0, sharded=True)
    for planner in (at_home, lambda *_: 1 // 0):
        balance.begin(EXPERTS_AT_HOME, planner)
        assert not balance.at_home
        shares = balance.shares(0, COUNTS_RE)
        assert (shares.slots, shares.copies, shares.keep) == (2, ((), ()), False)


@given(seed=st.integers(0, 2**32 - 1))
def test_ranks_of_several_nodes_expect_what_others_send_into_their_slots(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, (8, 8)) * rng.integers(0, 2, 8)
    policy = ExpertPolicy("drawn", slots=7, node_ranks=2)
    quotas = np.array([rng.multinomial(tokens, rng.dirichlet(np.ones(8))) for tokens in counts.sum(axis=0)])
    shares = [Shares(counts, quotas, copies_of(quotas), rank, policy) for rank in range(8)]
    for place, one in enumerate(shares):
        experts = torch.arange(8).repeat_interleave(torch.from_numpy(counts[place]))[:, None]
        sent = torch.bincount(one.slots_of(experts).flatten(), minlength=8 * one.slots)
        expected = sum(other.counts_of_slots[place] for other in shares)
        assert sent.tolist() == expected.tolist()
