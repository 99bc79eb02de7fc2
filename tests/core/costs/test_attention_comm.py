"""Communication of ranks that share sequences, against hops and exchanges counted by hand.

Links carry one byte a second inside a node of 4 ranks and half as much across; queries have 3 bytes a token, keys and
values 2, their gradients 4.
"""

from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
from evenload.core.costs.attention_comm import (
    AttentionLoad,
    SharedLoad,
    Times,
    alone_s,
    head_shares,
    load_of,
    times_of,
    together_s,
)
from evenload.core.costs.context import Direction, PlanningContext, Traffic
from evenload.core.costs.costs import Costs, PassCost
from evenload.core.costs.exposed import attention_s, exposed_of_ranks, exposed_s, moved_tokens
from evenload.core.machine.cluster import Link
from evenload.core.machine.layout import Layout
from evenload.core.plan.step_plan import CpComm, MicroBatch, Slice
from evenload.core.plan.token_layout import layout_of
from hypothesis import given
from hypothesis import strategies as st

from ..by_hand import NODES_OF_4

LAYOUT = Layout(dp=16)
TRAFFIC = Traffic(query_bytes_per_token=3.0, kv_bytes_per_token=2.0, kv_grad_frac=2.0)
COST = PassCost(token_s=1.0, pair_s=0.25)
COSTS = Costs(source="by hand", forward=COST, backward=COST)
FORWARD = Direction(COST, 1)
ENGINES = ("ring", "all_gather", "all_to_all", "hybrid")


def at(traffic=TRAFFIC, cluster=NODES_OF_4, layout=LAYOUT):
    return PlanningContext(COSTS, layout, cluster, traffic)


def exposed(tokens, ranks, cp_comm, passes, *, prefix=0, ulysses_degree=0, routed=False, cluster=NODES_OF_4, **changes):
    shared = SharedLoad(ranks, load_of([(tokens, prefix)]), cp_comm, ulysses_degree, routed)
    return float(attention_s(at(replace(TRAFFIC, **changes), cluster), Direction(COST, passes), shared)[0])


def test_a_hop_of_a_ring_hides_behind_one_block():
    """8 tokens on 4 ranks: hops of 2 tokens' K and V, 4 bytes; 32 pairs, so blocks of 0.25 * 32 / 4 / 4 seconds."""
    ranks, block = (0, 1, 2, 3), 0.5
    assert exposed(8, ranks, "ring", 1) == 3 * (4 - block)
    # Backward: the gradients, 8 bytes, follow one block later and need a hop more.
    assert exposed(8, ranks, "ring", 2) == (4 - block) + 2 * (4 + 8 - block) + (8 - block) + 8
    # 64 tokens: blocks of 32 s hide hops of 32 s, and the last hop CP group is always seen.
    assert exposed(64, ranks, "ring", 1) == 0
    assert exposed(64, ranks, "ring", 2) == 2 * (32 + 64 - 32) + (64 - 32) + 64


def test_a_prefix_hops_with_its_slice():
    """2 tokens after 6: K and V of 8 tokens hop; 2 * (6 + 1) pairs."""
    assert exposed(2, (0, 1), "ring", 1, prefix=6) == 8 - 0.25 * 14 / 2 / 2
    assert exposed(2, (0, 1), "all_gather", 1, prefix=6) == 8
    # Heads stay with their ranks, and so do the keys and values of a prefix.
    assert exposed(2, (0, 1), "all_to_all", 1, prefix=6) == exposed(2, (0, 1), "all_to_all", 1)


def test_every_layer_and_hop_has_its_latency():
    slow = NODES_OF_4.model_copy(update={"intra": Link(latency_s=0.25, bytes_per_s=1.0)})
    ranks = (0, 1, 2, 3)
    more = {
        cp_comm: [
            exposed(8, ranks, cp_comm, passes, ulysses_degree=2 * (cp_comm == "hybrid"), cluster=slow, layers=3)
            - exposed(8, ranks, cp_comm, passes, ulysses_degree=2 * (cp_comm == "hybrid"), layers=3)
            for passes in (1, 2)
        ]
        for cp_comm in ENGINES
    }
    assert more == {
        "ring": [3 * 0.75, (3 + 4) * 0.75],
        "all_gather": [3 * 0.75, 6 * 0.75],
        # There and back, 3 others each time.
        "all_to_all": [2 * 3 * 0.75, 2 * 3 * 0.75],
        "hybrid": [(2 + 1) * 0.75, (2 + 1 + 2) * 0.75],
    }


def test_all_hops_take_as_long_as_the_one_between_nodes():
    assert exposed(8, (2, 3, 4, 5), "ring", 1) == 3 * (2 * 4 - 0.5)
    assert exposed(8, (2, 3, 4, 5), "all_gather", 1) == 3 * 8


def test_nothing_hides_a_gather_or_an_exchange():
    """8 tokens on 4 ranks: 3 times 4 bytes to each; of a rank's 2 tokens, 3 + 3 + 2 bytes each, three quarters go."""
    assert [exposed(8, (0, 1, 2, 3), "all_gather", passes) for passes in (1, 2)] == [3 * 4, 3 * (4 + 8)]
    assert [exposed(8, (0, 1, 2, 3), "all_to_all", passes) for passes in (1, 2)] == [12, 12]


def test_a_hybrid_exchanges_inside_groups_and_hops_across():
    # Half of 2 tokens' 8 bytes leaves; hops of 2 tokens' K and V hide behind blocks of 0.25 * 32 / 4 / 2 s.
    assert exposed(8, (0, 1, 2, 3), "hybrid", 1, ulysses_degree=2) == 8 + (4 - 1)
    # Groups inside nodes: only hops cross.
    assert exposed(8, (2, 3, 4, 5), "hybrid", 1, ulysses_degree=2) == 8 + (8 - 1)
    # One group in two nodes: its exchange crosses, and all wait for it.
    assert exposed(8, (3, 4, 0, 1), "hybrid", 1, ulysses_degree=2) == 16 + (8 - 1)


@pytest.mark.parametrize(
    ("heads", "kv_bytes", "ranks", "copies", "busiest"),
    [
        (8, 6.0, 4, 1.0, 1.0),
        # Two key heads: two ranks each read one of them.
        (8, 1.5, 4, 2.0, 1.0),
        (8, 1.5, 8, 4.0, 1.0),
        # Heads 0-1, 2-4, 5-7: the second rank reads both key heads.
        (8, 1.5, 3, 2.0, 9 / 8),
        (6, 6.0, 4, 1.0, 2 * 4 / 6),
        (0, 1.5, 8, 1.0, 1.0),
    ],
)
def test_key_heads_are_copied_and_query_heads_uneven(heads, kv_bytes, ranks, copies, busiest):
    traffic = replace(TRAFFIC, heads=heads, kv_bytes_per_token=kv_bytes)
    assert head_shares(traffic, ranks) == (copies, pytest.approx(busiest))


def test_copied_keys_travel_and_the_busiest_rank_is_waited_for():
    """8 tokens on 3 ranks: two copies of 1.5 bytes a token; an eighth of 0.25 * 32 / 3 s more on the second rank."""
    found = exposed(8, (0, 1, 2), "all_to_all", 1, heads=8, kv_bytes_per_token=1.5)
    assert found == pytest.approx(8 / 3 * (6 + 2 * 1.5) * 2 / 3 + 0.25 * 32 / 3 / 8)


def test_the_ring_of_a_hybrid_carries_the_copies_too():
    """Four ranks of a group share 8 query and 2 key heads: 2 tokens a rank of 1.5 bytes, twice."""
    traffic = replace(TRAFFIC, heads=8, kv_bytes_per_token=1.5)
    times = times_of(at(traffic), FORWARD, SharedLoad(tuple(range(8)), AttentionLoad(16.0, 16.0, 0.0), "hybrid", 4))
    assert times.hop_s == 2 * 2 * 1.5 / 0.5


def test_more_ranks_than_heads_cannot_share_them():
    assert exposed(8, (0, 1, 2), "all_to_all", 1, heads=2) == float("inf")
    assert exposed(8, (0, 1, 2, 3), "hybrid", 2, ulysses_degree=2, heads=1) == float("inf")
    assert exposed(8, (0, 1, 2), "ring", 1, heads=2) < float("inf")


FAST_INSIDE = NODES_OF_4.model_copy(update={"intra": Link(latency_s=0.0, bytes_per_s=8.0)})


@pytest.mark.parametrize(
    ("ranks", "cp_comm", "ulysses_degree", "hop"),
    [
        # 4 bytes over 4 NICs, three quarters of them to and from the neighbours.
        ((0, 1, 2, 3, 4, 5, 6, 7), "ring", 0, 4 / 4 / 0.5 + 2 * 3 / 8),
        # All four send across: no NIC is free.
        ((0, 1, 2, 3, 4, 5, 6, 7), "hybrid", 4, 4 / 0.5 + 2 * 3 / 8),
        ((0, 4, 1, 5, 2, 6, 3, 7), "ring", 0, 4 / 0.5 + 2 * 3 / 8),
        # One rank on the other node: its NIC takes all.
        ((1, 2, 3, 4), "ring", 0, 4 / 0.5),
        ((0, 1, 2, 3), "ring", 0, 4 / 8),
    ],
)
def test_routed_hops_use_all_links_of_a_node(ranks, cp_comm, ulysses_degree, hop):
    load = AttentionLoad(2.0 * len(ranks), 2.0 * len(ranks), 0.0)
    times = times_of(at(cluster=FAST_INSIDE), FORWARD, SharedLoad(ranks, load, cp_comm, ulysses_degree, routed=True))
    assert times.hop_s == hop


def test_routed_hops_take_three_latencies():
    slow = FAST_INSIDE.model_copy(
        update={"intra": Link(latency_s=1.0, bytes_per_s=8.0), "inter": Link(latency_s=10.0, bytes_per_s=0.5)}
    )
    load = AttentionLoad(8.0, 8.0, 0.0)
    hops = [
        times_of(at(cluster=slow), FORWARD, SharedLoad((2, 3, 4, 5), load, "ring", routed=routed)).hop_s
        for routed in (False, True)
    ]
    assert hops == [10 + 4 / 0.5, 12 + 4 / 2 / 0.5 + 2 * 4 / 2 / 8]


def micro_batch(cp_groups, lengths, **more):
    ranks = tuple(sorted({rank for cp_group in cp_groups for rank in cp_group}))
    slices = tuple(Slice(i, 0, n) for i, n in enumerate(lengths))
    return MicroBatch(slices, ranks, **{"cp_comm": "ring", "cp_groups": cp_groups, **more})


def of_ranks(m, passes, traffic=TRAFFIC, layout=LAYOUT):
    return exposed_of_ranks(at(traffic, layout=layout), Direction(COST, passes), m).tolist()


def test_short_sequences_hide_the_first_hop_of_a_long_one():
    """8 tokens on ranks 0 and 1: hops of 8 s, blocks of 2 s. 4 more on rank 1 alone, 2 s; rank 2 shares nothing."""
    m = micro_batch(((0, 1), (1,), (2,)), (8, 4, 6))
    assert of_ranks(m, 1) == [8 - 2, 8 - 2 - 2, 0]
    assert of_ranks(m, 2) == [(8 - 2) + (16 - 2) + 16, (8 - 4) + (16 - 2) + 16, 0]
    assert exposed_s(at(), FORWARD, m) == 6


def test_short_sequences_hide_a_gathering_but_not_the_way_back():
    """8 tokens on ranks 0 and 1: 8 s there, 16 s back; 4 tokens more on rank 1 alone, 2 s."""
    m = micro_batch(((0, 1), (1,)), (8, 4), cp_comm="all_gather")
    assert of_ranks(m, 1) == [8, 8 - 2]
    assert of_ranks(m, 2) == [8 + 16, 8 - 2 + 16]


def test_a_larger_ring_computes_while_a_smaller_one_sends_home():
    """Ranks 0-2 share 24 tokens (hops of 16 s, blocks of 8 s), ranks 0 and 1 another 8 (8 s, 2 s)."""
    m = micro_batch(((0, 1, 2), (0, 1)), (24, 8))
    first, second, third, cp_group = 16 + 8 - 10, (16 + 32) + 16 - 10, 32 + 16 - 8, 32
    assert of_ranks(m, 2)[0] == first + second + third + cp_group
    assert of_ranks(m, 1)[0] == (16 + 8 - 10) + (16 - 10)


@given(
    st.sampled_from(ENGINES),
    st.lists(st.integers(8, 300), min_size=1, max_size=4),
    st.sampled_from([2, 4, 6, 8]),
    st.integers(1, 2),
    st.booleans(),
)
def test_homes_of_all_ranks_are_no_homes(cp_comm, lengths, degree, passes, routed):
    ranks = tuple(range(degree))
    m = micro_batch(
        (ranks,) * len(lengths),
        tuple(lengths),
        cp_comm=cp_comm,
        ulysses_degree=2 * (cp_comm == "hybrid"),
        routed=routed,
    )
    if cp_comm == "hybrid" and degree == 2:
        m = m._replace(cp_comm="all_to_all", ulysses_degree=0)
    traffic = replace(TRAFFIC, heads=8)
    whole = exposed_s(at(traffic), Direction(COST, passes), m._replace(cp_groups=()))
    assert of_ranks(m, passes, traffic) == pytest.approx([whole] * degree)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=2, max_size=6, unique=True), st.tuples(*[st.integers(0, 20)] * 5)
        ),
        max_size=5,
    ),
    st.lists(st.integers(0, 30), min_size=6, max_size=6),
)
def test_ranks_in_several_homes_take_turns_round_by_round(drawn, local):
    cp_groups = [(ranks, Times(*map(float, five), groups=len(ranks))) for ranks, five in drawn]
    expected = []
    for rank in range(6):
        mine = [times for ranks, times in cp_groups if rank in ranks]
        total = sum(t.open_s for t in mine)
        for k in range(8):
            under_way = sum(t.hop_s * (k < t.groups - 1) + t.grad_s * (1 <= k <= t.groups) for t in mine)
            under_way += sum(t.first_s for t in mine) * (k == 0)
            computed = sum(t.block_s * (k < t.groups) for t in mine) + local[rank] * (k == 0)
            total += max(0.0, under_way - computed)
        expected.append(total)
    assert together_s(cp_groups, np.array(local, dtype=np.float64)).tolist() == pytest.approx(expected)
    for _, times in cp_groups:
        ring = times._replace(first_s=0.0)
        assert together_s([([0], ring)], np.zeros(1))[0] == pytest.approx(alone_s(ring))


def test_a_table_is_its_entries():
    pieces = [(n, p) for n in (8, 100, 999) for p in (0, 64)]
    for cp_comm, passes in product(("", *ENGINES), (1, 2)):
        ulysses_degree = 2 * (cp_comm == "hybrid")
        shared = SharedLoad((0, 1, 4, 5), load_of(pieces), cp_comm, ulysses_degree)
        table = attention_s(at(), Direction(COST, passes), shared)
        for (n, p), seconds in zip(pieces, table.tolist(), strict=True):
            m = MicroBatch((Slice(0, p, p + n),), (0, 1, 4, 5), cp_comm=cp_comm, ulysses_degree=ulysses_degree)
            assert seconds == pytest.approx(exposed_s(at(), Direction(COST, passes), m))
    assert attention_s(at(), FORWARD, SharedLoad((3,), load_of(pieces), "ring")).tolist() == [0] * 6
    assert set(get_args(CpComm)) == {"", *ENGINES}


def test_moved_tokens_travel_there_and_their_outputs_back():
    """10 and 2 tokens become 6 and 6: 4 tokens of 3 + 3 + 2 bytes; nothing else is shared."""
    m = micro_batch(((0,), (1,)), (10, 2), remap=True)
    assert of_ranks(m, 1) == of_ranks(m, 2) == [32, 32]
    across = micro_batch(((0,), (4,)), (10, 2), remap=True)
    assert of_ranks(across, 1) == [64, 64]
    # 12, 3 and 3 become 6 each: rank 0 gives 3 tokens to its neighbour and 3 to the other node.
    both = micro_batch(((0,), (1,), (4,)), (12, 3, 3), remap=True)
    assert of_ranks(both, 1) == [24 + 48, 24, 48]
    even = micro_batch(((0,), (1,)), (6, 6), remap=True)
    assert of_ranks(even, 1) == [0, 0]
    slow = NODES_OF_4.model_copy(update={"intra": Link(latency_s=0.25, bytes_per_s=1.0)})
    found = exposed_of_ranks(at(replace(TRAFFIC, layers=3), slow), FORWARD, m)
    assert found.tolist() == [32 + 2 * 3 * 0.25] * 2


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 4))
def test_tokens_move_as_the_layout_says(drawn, node_ranks):
    m = micro_batch(tuple((rank,) for rank, _ in drawn), tuple(n for _, n in drawn), remap=True)
    owner = {
        which: {
            (p.sequence, t): rank
            for rank, pieces in layout_of(m._replace(remap=which), node_ranks).items()
            for p in pieces
            for t in range(p.start, p.stop)
        }
        for which in (False, True)
    }
    expected = np.zeros((2, len(m.ranks)))
    for token, before in owner[False].items():
        after = owner[True][token]
        if before != after:
            kind = int(before // node_ranks != after // node_ranks)
            for rank in (before, after):
                expected[kind, m.ranks.index(rank)] += 1
    nodes = [rank // node_ranks for rank in m.ranks]
    assert np.array(moved_tokens(m, nodes)).tolist() == expected.tolist()


def test_ranks_reduce_hidden_states_of_their_own_tokens():
    """Tensor parallelism of unlike ranks: 2 * 3 + 1 all-reduces of one byte a token, 2 * (n / 2) bytes each."""
    m = micro_batch(((0,), (1,)), (10, 2))
    traffic = replace(TRAFFIC, layers=3, state_bytes_per_token=1.0)
    assert of_ranks(m, 1, traffic, Layout(tp=2, dp=2)) == [7 * 10, 7 * 2]
