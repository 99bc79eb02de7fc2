"""Seconds of a layer under quotas, against layers small enough to work out by hand."""

import numpy as np
import pytest
from evenload.core.experts.quotas import at_home, check_quotas
from evenload.core.experts.seconds import CHOICE_BYTES, LayerCost, layer_seconds, once_a_node, paying_tokens
from evenload.core.machine.cluster import Link
from evenload.core.plan.expert_policy import ExpertPolicy

FAST, SLOW = Link(latency_s=0.0, bytes_per_s=4.0), Link(latency_s=0.0, bytes_per_s=1.0)
COST = LayerCost(
    forward_s=1.0, backward_s=2.0, token_bytes=4.0, weight_bytes=40.0, gradient_bytes=80.0, intra=FAST, inter=SLOW
)
POLICY = ExpertPolicy("test", slots=4)
H100 = COST._replace(
    forward_s=6 * 4096 * 1536 / 4.95e14,
    backward_s=0.0,
    token_bytes=0.0,
    weight_bytes=6.0 * 4096 * 1536,
    gradient_bytes=0.0,
    intra=Link(latency_s=0.0, bytes_per_s=4.5e11),
    inter=Link(latency_s=0.0, bytes_per_s=5e10),
)


def quotas_of(counts_RE, moves):
    """Counts and quotas in which (expert, rank, tokens) have left the expert's home."""
    counts = np.array(counts_RE)
    quotas_ER = at_home(counts, POLICY, ())
    for expert, rank, tokens in moves:
        quotas_ER[expert, expert * len(counts) // counts.shape[1]] -= tokens
        quotas_ER[expert, rank] += tokens
    return counts, check_quotas(quotas_ER, counts, POLICY, ())


def test_at_home_a_layer_waits_for_the_busiest_rank_and_for_who_receives_most():
    counts, quotas = quotas_of([[6, 2], [10, 0]], [])
    seconds = layer_seconds(counts, quotas, COST).forward
    # Rank 0 computes 16 tokens; 10 come to it, 2 leave it; 2 ranks tell each other 16 bytes of counts.
    assert seconds == (16 / 4, 2 * 10 * 4 / 4, 16.0, 0.0, 0.0)
    assert layer_seconds(counts, quotas, COST).backward == (0.0, 2 * 10 * 4 / 4, 32.0, 0.0, 0.0)
    assert layer_seconds(counts, quotas, COST._replace(plan_s=0.5)).forward.counts == 4.5


def test_a_copy_takes_tokens_off_the_busiest_rank_and_its_weights_stand_behind_tokens():
    counts, quotas = quotas_of([[6, 2], [10, 0]], [(0, 1, 7)])
    forward, backward = layer_seconds(counts, quotas, COST)
    # Rank 1 keeps 7 of its own 10 tokens: 3 leave it and 2 come. Rank 0 sends 2 tokens and the weights: 12 bytes of
    # tokens take 3 s, 8 + 40 bytes 12 s.
    assert forward.experts == 9.0
    assert forward.tokens == 2 * 3.0
    assert forward.copies == 12.0 - 3.0
    assert (backward.experts, backward.copies, backward.gradients) == (18.0, 0.0, 80 / 4)
    assert layer_seconds(counts, quotas, COST._replace(keep=False)).backward.copies == 40 / 4
    assert forward.total == sum(forward)


def test_an_expert_that_many_copy_is_sent_once_by_its_home():
    counts, quotas = quotas_of([[4, 0, 0, 0]] * 4, [(0, rank, 4) for rank in (1, 2, 3)])
    seconds = layer_seconds(counts, quotas, COST).forward
    # No token travels. Home sends three thirds, then each of three ranks two thirds to the others.
    assert seconds.tokens == 0.0
    assert seconds.copies == pytest.approx(40 / 4 + 2 / 3 * 40 / 4)
    assert layer_seconds(counts, quotas, COST).backward.gradients == pytest.approx(2 * seconds.copies)


def test_links_between_nodes_carry_what_crosses_them():
    counts, quotas = quotas_of([[0, 0, 4, 0], [4, 0, 0, 0], [0, 0, 4, 0], [0, 0, 4, 0]], [])
    on_nodes = COST._replace(node_ranks=2)
    # 4 tokens come to rank 2 from inside its node, 4 from the other one.
    assert layer_seconds(counts, quotas, COST).forward.tokens == 2 * 8 * 4 / 4
    assert layer_seconds(counts, quotas, on_nodes).forward.tokens == 2 * 4 * 4 / 1
    _, moved = quotas_of(counts.tolist(), [(2, 3, 4)])
    assert layer_seconds(counts, moved, on_nodes).backward.gradients == 80 / 4
    _, away = quotas_of(counts.tolist(), [(2, 0, 4)])
    assert layer_seconds(counts, away, on_nodes).backward.gradients == 80 / 1


def test_tokens_that_go_once_to_a_node_take_one_row_there_and_are_passed_on_inside():
    """Four ranks in nodes of two, two experts a rank and token; all tokens of rank 0 go to rank 3, 8 of rank 1 to rank
    0: rank 2 gets 8 rows for 16 and passes them on."""
    counts, quotas = quotas_of([[0] * 6 + [8, 8], [4, 4, 0, 0, 0, 0, 0, 0], [0] * 8, [0] * 8], [])
    cost = COST._replace(node_ranks=2, once_topk=2)
    forward, backward = layer_seconds(counts, quotas, cost)
    rows_s, passed_s = 8 * (4.0 + 4 * CHOICE_BYTES), 16 * 4.0 / 4.0
    assert forward.tokens == backward.tokens == 2 * (rows_s + passed_s)
    assert layer_seconds(counts, quotas, cost._replace(once_topk=0)).forward.tokens == 2 * 16 * 4.0
    assert layer_seconds(counts, quotas, cost._replace(node_ranks=0)).forward.tokens == 2 * 16 * 4.0 / 4.0


@pytest.mark.parametrize(("exponent", "near"), [(0.0, 0.01), (0.5, 0.04)])
def test_rows_of_a_node_are_about_those_of_drawn_tokens(exponent, near):
    """Eight different experts of 64 a token; nodes have 8 neighbouring ones each."""
    rng = np.random.default_rng(0)
    logits_E = rng.permutation(-exponent * np.log(np.arange(1, 65)))
    scores_TE = logits_E + rng.gumbel(size=(20_000, 64))
    nodes_TK = np.argsort(scores_TE, axis=1)[:, -8:] // 8
    goes_TN = (nodes_TK[:, :, None] == np.arange(8)).any(axis=1)
    share_N = np.bincount(nodes_TK.ravel(), minlength=8) / nodes_TK.size
    predicted_N = once_a_node(share_N, 8, 64) * nodes_TK.size
    assert np.abs(predicted_N / goes_TN.sum(axis=0) - 1).max() < near


def test_a_copy_pays_from_rate_over_bandwidth_tokens_up():
    """Of a forward alone 4.95e14 FLOP/s over 450 GB/s, or 400 Gbit/s, whatever the size of an expert."""
    assert paying_tokens(H100) == pytest.approx(1100)
    assert paying_tokens(H100._replace(node_ranks=8)) == pytest.approx(9900)
    backward = H100._replace(
        forward_s=0.0, backward_s=2 * H100.forward_s, gradient_bytes=2 * H100.weight_bytes, weight_bytes=0.0
    )
    again = backward._replace(weight_bytes=H100.weight_bytes)
    assert paying_tokens(again) == pytest.approx(1.5 * 1100)
    assert paying_tokens(backward) == pytest.approx(1100)
    assert paying_tokens(H100._replace(keep=False)) == pytest.approx(2200), "what is let go travels a second time"
    # A token of as many seconds on its way as at its expert, four times: a fifth of the tokens pays.
    assert paying_tokens(H100._replace(token_bytes=H100.forward_s * 450e9)) == pytest.approx(220)


def test_a_copy_that_takes_what_pays_takes_no_longer_than_none():
    """The break-even is where the seconds of both are equal, if all else is even and weights hide behind nothing."""
    cost = COST._replace(token_bytes=0.0)
    tokens = int(paying_tokens(cost))
    assert tokens == (40 + 80) / 4 / 3
    counts, home = quotas_of([[2 * tokens, 0], [0, 0]], [])
    _, copied = quotas_of(counts.tolist(), [(0, 1, tokens)])

    def total(quotas):
        return layer_seconds(counts, quotas, cost).total

    assert total(copied) == total(home)
