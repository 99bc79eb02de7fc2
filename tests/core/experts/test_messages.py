"""Messages give every rank all of each of its copies once, and keep no home sending."""

from collections import Counter

from evenload.core.experts.messages import MANY, hops_of, hops_of_pieces
from hypothesis import given
from hypothesis import strategies as st

RANKS, OWN, SIZE = 6, 2, 23


@st.composite
def drawn_copies(draw):
    others = [[e for e in range(RANKS * OWN) if e // OWN != rank] for rank in range(RANKS)]
    return tuple(tuple(sorted(draw(st.sets(st.sampled_from(experts))))) for experts in others)


@given(drawn_copies())
def test_every_weight_of_a_copy_arrives_once_and_is_there_before_it_is_sent_on(copies):
    known = {(rank, e): set(range(SIZE)) for rank in range(RANKS) for e in range(rank * OWN, rank * OWN + OWN)}
    first, second = hops_of(copies, OWN)
    for hop in (first, second):
        arrived = []
        for message in hop:
            weights = set(range(*message.bounds(SIZE)))
            assert weights <= known.get((message.sender, message.expert), set())
            arrived.append(((message.receiver, message.expert), weights))
        for place, weights in arrived:
            assert not weights & known.setdefault(place, set())
            known[place] |= weights
    assert all(known[rank, expert] == set(range(SIZE)) for rank, experts in enumerate(copies) for expert in experts)
    assert sum(len(one) for one in copies) == len(known) - RANKS * OWN


def test_the_home_of_an_expert_that_all_copy_sends_it_once():
    copies = ((), *(((0,),) * (RANKS - 1)))
    first, second = hops_of(copies, OWN)
    assert RANKS - 1 >= MANY
    assert sum(m.length(SIZE) for m in first) == SIZE
    sent = Counter()
    for message in second:
        sent[message.sender] += message.length(SIZE)
    assert max(sent.values()) <= SIZE


def test_experts_that_are_cut_come_whole_with_a_piece_from_each_rank():
    experts = [(0, 1, 4), (2, 3), (4, 5, 0)]
    pieces, second = hops_of_pieces(experts)
    assert second == ()
    for rank, wanted in enumerate(experts):
        for expert in wanted:
            own = [m for m in pieces if (m.receiver, m.expert) == (rank, expert)]
            assert [m.sender for m in own] == [m.piece for m in own] == [0, 1, 2]
            assert [weight for m in own for weight in range(*m.bounds(SIZE))] == list(range(SIZE))
    assert len(pieces) == 3 * sum(map(len, experts))
