"""How shared micro-batches are dealt: every token once, evenly, the pairs too, and tokens moved inside nodes first."""

import json
from dataclasses import replace

import pytest
from evenload.core.errors import PlanError
from evenload.core.laws import check
from evenload.core.plan.limits import Limits
from evenload.core.plan.step_plan import MicroBatch, Op, Slice, StepPlan, as_lengths
from evenload.core.plan.token_layout import CpGroup, attended, cp_group_of, dealt, layout_of, tokens_of_ranks
from evenload.core.plan_json import read_step, step_json
from hypothesis import given
from hypothesis import strategies as st

PIECE = Slice(0, 100, 164)


def pairs(pieces):
    return sum(p.length * (p.start + p.length / 2) for p in pieces)


@given(st.integers(1, 200), st.integers(0, 50), st.integers(1, 6), st.integers(1, 4))
def test_every_token_is_attended_for_by_each_place_of_one_group_and_dealt_once(length, start, groups, ulysses_degree):
    piece, cp_group = Slice(3, start, start + length), CpGroup(tuple(range(groups * ulysses_degree)), ulysses_degree)
    wanted = set(range(start, start + length))
    tokens = [{t for p in dealt(piece, cp_group, place) for t in range(p.start, p.stop)} for place in cp_group.ranks]
    assert sum(map(len, tokens)) == length
    assert set().union(*tokens) == wanted
    for place in cp_group.ranks:
        group = {t for p in attended(piece, cp_group, place) for t in range(p.start, p.stop)}
        first = place // ulysses_degree * ulysses_degree
        assert group == set().union(*tokens[first : first + ulysses_degree])


def test_zig_zag_chunks_give_every_group_the_same_number_of_pairs():
    cp_group = CpGroup((0, 1, 2, 3), 1)
    work = [pairs(attended(Slice(0, 0, 64), cp_group, place)) for place in range(4)]
    assert work == [512.0] * 4
    assert attended(PIECE, cp_group, 3) == (Slice(0, 124, 140),)  # the two middle chunks lie side by side


def test_heads_are_shared_by_neighbours_and_tokens_by_all():
    whole = MicroBatch((PIECE,), (3, 1, 2, 0), cp_comm="all_to_all")
    assert cp_group_of(whole, 0) == CpGroup((3, 1, 2, 0), 4)
    assert layout_of(whole) == {r: (Slice(0, 100 + 16 * i, 116 + 16 * i),) for i, r in enumerate((3, 1, 2, 0))}
    hybrid = whole._replace(cp_comm="hybrid", ulysses_degree=2)
    assert layout_of(hybrid)[3] == (Slice(0, 100, 116),)
    assert layout_of(hybrid)[1] == (Slice(0, 148, 164),)


@st.composite
def shared(draw):
    num_ranks = draw(st.integers(2, 6))
    lengths = draw(st.lists(st.integers(num_ranks, 60), min_size=1, max_size=5))
    cp_groups = [tuple(draw(st.permutations(range(num_ranks)))[: draw(st.integers(1, num_ranks))]) for _ in lengths]
    ranks = tuple(range(num_ranks))
    slices = tuple(Slice(i, 0, n) for i, n in enumerate(lengths))
    return MicroBatch(slices, ranks, cp_comm="ring", cp_groups=tuple(cp_groups), remap=draw(st.booleans()))


@given(shared(), st.integers(0, 3))
def test_layouts_hold_every_token_once_and_a_remap_evens_them(micro_batch, node_ranks):
    layout = layout_of(micro_batch, node_ranks)
    found = sorted((p.sequence, t) for pieces in layout.values() for p in pieces for t in range(p.start, p.stop))
    assert found == [(s.sequence, t) for s in micro_batch.slices for t in range(s.stop)]
    counts = {rank: sum(p.length for p in pieces) for rank, pieces in layout.items()}
    assert counts == tokens_of_ranks(micro_batch)
    if micro_batch.remap:
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_remap_moves_tokens_inside_a_node_before_it_crosses():
    cp_groups = ((0,), (1,), (2,), (3,))
    slices = tuple(Slice(i, 0, n) for i, n in enumerate((6, 10, 10, 6)))
    layout = layout_of(MicroBatch(slices, (0, 1, 2, 3), cp_comm="ring", cp_groups=cp_groups, remap=True), node_ranks=2)
    assert layout[0] == (Slice(0, 0, 6), Slice(1, 8, 10))
    assert layout[3] == (Slice(3, 0, 6), Slice(2, 8, 10))


LIMITS = Limits(4, 1 << 20, heads=4)


def plan(*micro_batches, lengths=(40, 9), limits=LIMITS):
    return StepPlan(as_lengths(lengths), micro_batches, limits)


ALL = (0, 1, 2, 3)
BOTH = (Slice(0, 0, 40), Slice(1, 0, 9))


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (MicroBatch(BOTH, ALL, cp_comm="ring", cp_groups=(ALL,)), "one CP group for each slice"),
        (MicroBatch(BOTH, ALL, cp_comm="ring", cp_groups=((0, 1), (2,))), "no slice's CP group"),
        (MicroBatch(BOTH, (0, 1), cp_comm="ring", cp_groups=((0, 2), (1,))), "not among the ranks"),
        (MicroBatch(BOTH, ALL, cp_comm="ring", ulysses_degree=2), "belongs to the cp_comm hybrid"),
        (MicroBatch(BOTH, ALL, cp_comm="hybrid", ulysses_degree=3), "do not divide"),
        (MicroBatch(BOTH, (0, 1, 2), cp_comm="hybrid", ulysses_degree=3), "does not divide the ranks"),
        (MicroBatch(BOTH, ALL, cp_comm="ring", pad_to=40), "is padded"),
    ],
)
def test_layouts_that_no_attention_runs_are_refused(broken, word):
    with pytest.raises(PlanError, match=word):
        check(plan(broken))


def test_more_ranks_than_heads_and_ranks_without_tokens_are_refused():
    with pytest.raises(PlanError, match="more ranks share heads than there are"):
        check(plan(MicroBatch(BOTH, ALL, cp_comm="all_to_all"), limits=replace(LIMITS, heads=3)))
    with pytest.raises(PlanError, match="would have no token"):
        check(plan(MicroBatch((Slice(0, 0, 1), Slice(1, 0, 3)), ALL, cp_comm="ring"), lengths=(1, 3)))


def test_a_ring_may_grow_but_not_shrink_and_heads_stay_where_they_are():
    chunks = [Slice(0, a, b) for a, b in ((0, 20), (20, 40))]
    order = ((Op("F", 0), Op("F", 1), Op("B", 1), Op("B", 0)),)

    def chain(*ranks, cp_comm="ring"):
        rows = [MicroBatch((c,), r, cp_comm=cp_comm) for c, r in zip(chunks, ranks, strict=True)]
        return replace(plan(*rows, lengths=(40,)), order=order)

    check(chain((1,), (2, 1, 0)))
    check(chain((1, 2), (1, 2), cp_comm="all_to_all"))
    for ranks, cp_comm in ((((0, 1), (1, 2, 3)), "ring"), (((1, 2), (1, 2, 3)), "all_to_all")):
        with pytest.raises(PlanError, match="runs away from its prefix"):
            check(chain(*ranks, cp_comm=cp_comm))


def test_plans_that_share_otherwise_have_other_digests_and_survive_json():
    first = plan(MicroBatch(BOTH, ALL, cp_comm="ring"))
    other = [
        MicroBatch(BOTH, ALL, cp_comm="all_gather"),
        MicroBatch(BOTH, ALL, cp_comm="hybrid", ulysses_degree=2),
        MicroBatch(BOTH, ALL, cp_comm="ring", cp_groups=((0, 1, 2), (3,))),
        MicroBatch(BOTH, ALL, cp_comm="ring", remap=True),
        MicroBatch(BOTH, ALL, cp_comm="ring", routed=True),
    ]
    digests = {plan(m).digest for m in other} | {first.digest, replace(first, offload=(0.5,)).digest}
    assert len(digests) == 7
    for m in other:
        kept = replace(plan(m), offload=(0.5,))
        assert read_step(json.loads(json.dumps(step_json(kept))), LIMITS).digest == kept.digest


@given(
    st.lists(st.integers(8, 90), min_size=1, max_size=5),
    st.sampled_from([("ring", 0, 3), ("all_gather", 0, 4), ("all_to_all", 0, 5), ("hybrid", 2, 6), ("hybrid", 3, 6)]),
    st.booleans(),
)
def test_counts_of_ranks_are_those_of_the_layout(lengths, shared, own_cp_groups):
    cp_comm, ulysses_degree, degree = shared
    slices = tuple(Slice(i, 0, n) for i, n in enumerate(lengths))
    ranks = tuple(reversed(range(degree)))
    cp_groups = tuple(ranks if i % 2 == 0 else (i % degree,) for i in range(len(slices))) if own_cp_groups else ()
    m = MicroBatch(slices, ranks, cp_comm=cp_comm, ulysses_degree=ulysses_degree, cp_groups=cp_groups)
    counts = {rank: sum(p.length for p in pieces) for rank, pieces in layout_of(m).items()}
    assert tokens_of_ranks(m) == counts
    assert list(tokens_of_ranks(m)) == list(ranks)
