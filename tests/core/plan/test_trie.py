"""A trie of rows: what they begin with in common is there once, a trunk right before all that continues it."""

import numpy as np
import pytest
from evenload.core.plan.trie import WORTH, Branching, Trie, trie_of
from harness.tries import BY_HAND, rows_of, tries
from hypothesis import given
from hypothesis import strategies as st


def read_back(trie: Trie, rows: list) -> None:
    """Every row stands on whole segments, each of which continues the one before it."""
    ranges, every = trie.branching.ranges, np.concatenate(rows)
    of_slots = every[trie.sources]
    for row, slots in zip(rows, trie.slots, strict=True):
        assert np.array_equal(of_slots[slots], row)
        last = next(number for number, one in enumerate(ranges) if one.start <= slots[-1] < one.stop)
        way = [np.arange(trie.num_tokens)[ranges[number]] for number in trie.branching.path(last)]
        assert np.array_equal(np.concatenate(way), slots)


def subtrees(branching: Branching) -> None:
    """What continues a segment is one range of slots right after it."""
    segments = range(len(branching.lengths))
    for one, own, end in zip(segments, branching.ranges, branching.ends, strict=True):
        continued = [other for other in segments if one in branching.path(other)[:-1]]
        assert end == own.stop + sum(branching.lengths[other] for other in continued)
        assert all(own.stop <= branching.ranges[other].start < end for other in continued)


def check_whole(rows: list) -> Trie:
    """With no least worth: a slot for each distinct prefix of a row, and no more."""
    trie = trie_of(rows, worth=0)
    of_prefix: dict[bytes, int] = {}
    for row, slots in zip(rows, trie.slots, strict=True):
        for place, slot in enumerate(slots.tolist()):
            assert of_prefix.setdefault(row[: place + 1].tobytes(), slot) == slot
    assert sorted(of_prefix.values()) == list(range(trie.num_tokens))
    assert trie.is_shared == (trie.num_tokens < sum(map(len, rows)))
    assert min(trie.branching.lengths) > 0
    assert trie.branching.longest == max(map(len, rows))
    width = rows[0][:1].nbytes
    assert trie.branching.pairs == sum(len(prefix) // width for prefix in of_prefix)
    read_back(trie, rows)
    subtrees(trie.branching)
    return trie


@pytest.mark.parametrize("name", BY_HAND)
def test_tries_by_hand_have_each_prefix_once(name):
    check_whole(rows_of(BY_HAND[name]))


def test_the_segments_of_a_trie():
    trie = check_whole([np.array([ord(letter) for letter in row]) for row in ("xy", "abcde", "abcfg", "abc")])
    assert trie.branching == ((3, 2, 2, 2), (-1, 0, 0, -1))
    assert [slots.tolist() for slots in trie.slots] == [[7, 8], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 2]]
    assert trie.branching.starts == (0, 3, 3, 0)
    assert trie.branching.ends == (7, 5, 7, 9)


@given(tries())
def test_each_prefix_of_each_row_is_one_slot(rows):
    check_whole(rows)


@given(tries(), st.data())
def test_tokens_are_alike_where_all_that_tells_them_apart_is(rows, data):
    """Rows [L, K]: another position makes another token."""
    shifts = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    check_whole([np.stack([row, np.arange(len(row)) + by], 1) for row, by in zip(rows, shifts, strict=True)])


@given(tries())
def test_what_is_not_worth_it_is_there_more_than_once_and_reads_the_same(rows):
    trie, whole = trie_of(rows), trie_of(rows, worth=0)
    assert whole.num_tokens <= trie.num_tokens <= sum(map(len, rows))
    prefixes: dict[int, bytes] = {}
    for row, slots in zip(rows, trie.slots, strict=True):
        for place, slot in enumerate(slots.tolist()):
            assert prefixes.setdefault(slot, row[: place + 1].tobytes()) == row[: place + 1].tobytes()
    read_back(trie, rows)
    subtrees(trie.branching)


@pytest.mark.parametrize(("more", "shared"), [(0, True), (1, False)])
def test_a_trunk_is_worth_it_by_the_tokens_that_read_it(more, shared):
    """Two of its rows save its tokens once."""
    trunk, readers = 3, 3 * WORTH + more
    ends = [np.full(readers // 2, 8), np.full(readers - readers // 2, 9)]
    assert trie_of([np.concatenate([np.zeros(trunk, dtype=np.int64), end]) for end in ends]).is_shared is shared


def test_no_rows_share_nothing():
    trie = trie_of([])
    assert trie.num_tokens == 0
    assert not trie.is_shared
    assert trie.branching.longest == trie.branching.pairs == 0
