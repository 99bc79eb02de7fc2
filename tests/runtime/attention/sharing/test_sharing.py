"""The pure parts of sharing: what is refused, what goes first, and the legs of messages between nodes."""

from collections import Counter

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.sharing.jobs import heads_of, jobs_of
from evenload.runtime.attention.sharing.routing import RankMessage, legs_of
from evenload.runtime.world.plane import Plane
from hypothesis import given
from hypothesis import strategies as st


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(EvenloadError, match="more ranks share heads than there are"):
        heads_of(0, 5, 4, 2)


def test_jobs_that_send_farthest_begin_first():
    slices = tuple(Slice(i, 0, 9) for i in range(5))
    cp_groups = ((1,), (0, 1), (2, 1), (0,), (3, 0))
    jobs = jobs_of(
        MicroBatch(slices, (0, 1, 2, 3), cp_comm="ring", cp_groups=cp_groups), 2, lambda _: False, lambda *_: 0
    )
    assert [job.cp_group.ranks for job in jobs] == [(2, 1), (3, 0), (0, 1), (1,), (0,)]


@given(st.permutations(range(9)), st.integers(2, 9), st.integers(1, 4), st.integers(0, 50))
def test_messages_between_nodes_arrive_whole_over_all_links(order, count, node_ranks, size):
    members = tuple(order[:count])
    messages = [RankMessage(a, b, size) for a, b in zip(members, members[1:] + members[:1], strict=True)]
    here = {(n, m.source, i) for n, m in enumerate(messages) for i in range(size)}
    links = Counter()
    for stage in legs_of(messages, members, node_ranks):
        arrived = set()
        for leg in stage:
            moved = {(leg.message, leg.source, i) for i in range(leg.first, leg.end)}
            assert moved <= here
            here -= moved
            arrived |= {(leg.message, leg.to, i) for i in range(leg.first, leg.end)}
            if leg.source // node_ranks != leg.to // node_ranks:
                links[leg.message] += 1
        here |= arrived
    assert here == {(n, m.to, i) for n, m in enumerate(messages) for i in range(size)}
    of_node = Counter(rank // node_ranks for rank in members)
    for number, message in enumerate(messages):
        nodes = message.source // node_ranks, message.to // node_ranks
        assert links[number] == (min(of_node[n] for n in nodes) if nodes[0] != nodes[1] else 0)


def test_a_plane_needs_every_rank_in_one_row(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    with pytest.raises(EvenloadError, match="a rank does not know its plane"):
        Plane.make([(0, 1)])


@pytest.mark.parametrize(
    ("cp_comm", "plane", "told"),
    [
        ("ring", None, r"ranks \(0, 1\) share a micro-batch, and this host gives them no plane"),
        ("", Plane(None, (0, 1), 0), "the static context parallelism that only predictions know"),
    ],
)
def test_what_cannot_be_shared_is_refused(cp_comm, plane, told):
    with pytest.raises(EvenloadError, match=told):
        build_pack(
            MicroBatch((Slice(0, 0, 9),), (0, 1), cp_comm=cp_comm), lambda i: torch.zeros(9).numpy(), plane=plane
        )


def test_a_pack_holds_what_its_rank_has_of_the_token_layout():
    plane = Plane(None, (0, 1), 1)
    shared = MicroBatch((Slice(0, 4, 16), Slice(1, 0, 3)), (1, 0), cp_comm="ring", cp_groups=((1, 0), (1,)))
    pack = build_pack(shared, lambda i: torch.arange(20).numpy() + 100 * i, plane=plane)
    assert pack.slices == (Slice(0, 4, 7), Slice(0, 13, 16), Slice(1, 0, 3))
    assert pack.positions_T.tolist() == [4, 5, 6, 13, 14, 15, 0, 1, 2]
    assert pack.tokens_T.tolist() == [4, 5, 6, 13, 14, 15, 100, 101, 102]
    assert pack.labels_T.tolist() == [5, 6, 7, 14, 15, 16, 101, 102, 103]
