"""The pure parts of sharing: heads, tiles of a ring, who brings how much, and the legs of messages between nodes."""

from collections import Counter

import pytest
import torch
from evenload.core.errors import EvenloadError
from evenload.core.plan.step_plan import MicroBatch, Slice
from evenload.core.plan.token_layout import CpGroup, attended
from evenload.runtime.attention.pack import build_pack
from evenload.runtime.attention.sharing import gather, ring
from evenload.runtime.attention.sharing.jobs import heads_of, jobs_of
from evenload.runtime.attention.sharing.routing import RankMessage, legs_of
from evenload.runtime.world.plane import Plane
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_every_query_head_is_with_one_rank_and_reads_its_own_keys(num_keys, each, shares):
    num_queries = num_keys * each
    if shares > num_queries:
        with pytest.raises(EvenloadError, match="more ranks share heads than there are"):
            heads_of(0, shares, num_queries, num_keys)
        return
    seen = []
    for share in range(shares):
        heads = heads_of(share, shares, num_queries, num_keys)
        mine = list(range(heads.queries.start, heads.queries.stop))
        keys = heads.spread(torch.arange(num_keys)[None, heads.keys, None])[0, :, 0].tolist()
        run = len(mine) // len(keys)
        assert len(mine) == run * len(keys)  # what the blocks want
        assert [keys[i // run] for i in range(len(mine))] == [head // each for head in mine]
        seen += mine
    assert seen == list(range(num_queries))


def test_gradients_of_a_key_head_that_was_repeated_are_summed():
    heads = heads_of(1, 3, 8, 2)  # query heads 2 to 4: two read key head 0, one reads key head 1
    assert heads.copies == (0, 0, 1)
    assert heads.folded(torch.tensor([[[1.0], [2.0], [4.0]]])).flatten().tolist() == [3, 4]


def pairs_seen(tiles_of, queries, keys):
    """How often each (query, key) of one slice is computed."""
    seen = Counter()
    for tile, key_tokens in tiles_of:
        for row, query in enumerate(queries[tile.first : tile.end]):
            last = tile.keys - (tile.end - tile.first) + row + 1 if tile.causal else tile.keys
            seen.update((query, key) for key in key_tokens[:last])
    return seen


@given(st.integers(1, 30), st.integers(2, 5), st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_each_engine_computes_every_causal_pair_once(length, groups, earlier):
    """Tokens of earlier slices are -1, -2, ...; all of them are seen by all queries."""
    piece, cp_group = Slice(0, 0, length), CpGroup(tuple(range(groups)), 1)
    micro_batch = MicroBatch((piece,), cp_group.ranks, cp_comm="ring")
    (job,) = jobs_of(micro_batch, 0, lambda _: True, lambda _, rank: earlier[rank])
    (part,) = job.parts
    own = [[t for p in attended(piece, cp_group, place) for t in range(p.start, p.stop)] for place in range(groups)]
    names = iter(range(-1, -100, -1))
    before = [[next(names) for _ in range(earlier[group])] for group in range(groups)]
    brought = [before[group] + own[group] for group in range(groups)]
    assert [held.all for held in part.group_tokens] == [len(keys) for keys in brought]
    ordered = gather._in_order([torch.tensor(keys, dtype=torch.int64) for keys in brought], part).tolist()
    taken = [torch.cat(gather._of_group(torch.tensor(ordered), part, group)).tolist() for group in range(groups)]
    assert taken == brought
    for group in range(groups):
        hops = [
            (t, brought[visitor]) for visitor in range(groups) for t in ring.tiles(group, visitor, part.group_tokens)
        ]
        at_once = [(tile, ordered) for tile in gather.tiles(group, part)]
        wanted = Counter((q, k) for q in own[group] for keys in brought for k in keys if k <= q)
        assert pairs_seen(hops, own[group], brought) == wanted
        assert pairs_seen(at_once, own[group], ordered) == wanted


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
