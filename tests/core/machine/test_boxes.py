"""Boxes of unlike layouts: each value goes to each other replica once, and all ranks end with the same bits."""

from collections import Counter

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.core.machine.boxes import HeldPart, boxes_of, bundles_of
from hypothesis import given
from hypothesis import strategies as st

VOCABULARY, HIDDEN, FFN, LAYERS = 10, 4, 12, 3
LAYOUTS = [(tp, stages, dp) for tp in (1, 2) for stages in ((3,), (1, 2), (2, 1)) for dp in (1, 2)]
"""(tensor-parallel ranks, layers of each stage, data-parallel ranks): twelve."""
SHAPES = {
    "embedding": (VOCABULARY, HIDDEN),
    **{f"{n}.norm": (HIDDEN,) for n in range(LAYERS)},
    **{f"{n}.gated": (FFN, HIDDEN) for n in range(LAYERS)},
    **{f"{n}.row": (HIDDEN, FFN) for n in range(LAYERS)},
}


def part_of(name, tp, rank):
    shape = SHAPES[name]
    kind = name.partition(".")[2]
    if kind == "norm":
        return HeldPart(shape, 0, ((0, shape[0]),))
    if not kind:  # padded: the last rank has rows that no token has
        rows = -(-VOCABULARY // tp)
        return HeldPart(shape, 0, ((rank * rows, min(VOCABULARY, (rank + 1) * rows)),))
    if kind == "row":
        return HeldPart(shape, 1, ((rank * FFN // tp, (rank + 1) * FFN // tp),))
    half = FFN // 2 // tp
    ranges = tuple((turn * FFN // 2 + rank * half, turn * FFN // 2 + (rank + 1) * half) for turn in range(2))
    return HeldPart(shape, 0, ranges if tp > 1 else ((0, FFN),))


def held_by(layout, first_rank):
    """What each rank of a replica holds: its stage's layers, and of a tied embedding both ends."""
    tp, stages, dp = layout
    ranks, begin = {}, 0
    for stage, layers in enumerate(stages):
        numbers = range(begin, begin + layers)
        begin += layers
        ends = ["embedding"] if stage in (0, len(stages) - 1) else []
        names = ends + [name for name in SHAPES if name.partition(".")[0] in map(str, numbers)]
        for _ in range(dp):
            for rank in range(tp):
                ranks[first_rank + len(ranks)] = {name: part_of(name, tp, rank) for name in names}
    return ranks


def taken(whole, part):
    return np.concatenate([whole.take(range(*one), part.dim) for one in part.ranges], part.dim)


def view(tensor, part, box):
    place = part.place_of(box.start)
    return tensor.swapaxes(0, box.dim)[place : place + box.stop - box.start]


@given(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=3), st.integers(8, 64), st.integers(0, 9))
def test_every_value_is_sent_once_and_all_replicas_have_the_same_bits(layouts, most, seed):
    replicas, rng = [], np.random.default_rng(seed)
    for layout in layouts:
        replicas.append(held_by(layout, sum(map(len, replicas))))
    wholes = [{name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in replicas]
    tensors = {
        rank: {name: taken(whole[name], part) for name, part in parts.items()}
        for whole, replica in zip(wholes, replicas, strict=True)
        for rank, parts in replica.items()
    }
    held = {rank: parts for replica in replicas for rank, parts in replica.items()}
    boxes = boxes_of(replicas, most)
    assert [box for bundle in bundles_of(boxes, most) for box in bundle] == boxes
    assert all(sum(box.values for box in bundle) <= most or len(bundle) == 1 for bundle in bundles_of(boxes, most))
    counts = Counter()
    for box in boxes:
        assert box.values <= max(most, max(SHAPES[box.name]))
        assert [owner in of for owner, of in zip(box.owners, box.holders, strict=True)] == [True] * len(replicas)
        views = [view(tensors[rank][box.name], held[rank][box.name], box) for rank in box.owners]
        counts[box.name] += views[0].size
        total = views[0].copy()
        for value in views[1:]:
            total = total + value
        for ranks in box.holders:
            for rank in ranks:
                view(tensors[rank][box.name], held[rank][box.name], box)[:] = total
    assert counts == {name: np.prod(shape) for name, shape in SHAPES.items()}
    for rank, parts in held.items():
        for name, part in parts.items():
            wanted = wholes[0][name]
            for whole in wholes[1:]:
                wanted = wanted + whole[name]
            assert np.array_equal(tensors[rank][name], taken(wanted, part))


def test_ranks_that_hold_the_same_share_the_sending():
    boxes = boxes_of([held_by((1, (3,), 2), 0), held_by((1, (3,), 2), 2)], 1 << 20)
    loads = Counter()
    for box in boxes:
        loads.update(dict.fromkeys(box.owners, box.values))
    assert max(loads.values()) <= 1.1 * min(loads.values())
    assert {box.owners for box in boxes} == {(0, 2), (1, 3)}  # counterpart to counterpart


def test_replicas_of_other_models_are_refused():
    fewer = {2: {name: part for name, part in held_by((1, (3,), 1), 2)[2].items() if name != "1.norm"}}
    with pytest.raises(EvenloadError, match="different parameters") as caught:
        boxes_of([held_by((1, (3,), 1), 0), fewer], 64)
    assert "replica 1 has no 1.norm" in caught.value.found
