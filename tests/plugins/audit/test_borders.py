"""Where `evenload audit` finds the samples of a batch: every way of saying it, samples of one token at any place."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from evenload.plugins.audit.borders import spans
from evenload.plugins.audit.watched import RememberingCollator, forget, lengths_of
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=6)
PADDING = st.integers(0, 2)


def packed(lengths: list[int], left: int, right: int) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Tokens [1, T] of a padded row of these samples, each token another number, and where the samples are."""
    borders = [*accumulate(lengths, initial=left)]
    return torch.arange(100, 100 + borders[-1] + right)[None], [(0, a, b) for a, b in pairwise(borders)]


def in_row(lengths: list[int], values: list[list[int]], left: int, right: int) -> torch.Tensor:
    assert [len(own) for own in values] == lengths
    return torch.tensor([[0] * left + [value for own in values for value in own] + [0] * right])


@given(LENGTHS, PADDING, PADDING)
def test_masks_that_number_samples_positions_that_start_again_and_cu_seqlens_say_where_they_are(
    lengths: list[int], left: int, right: int
) -> None:
    """Positions and cu_seqlens also below a mask that does not number them; a sample of padding is none."""
    tokens_BT, wanted = packed(lengths, left, right)
    numbers_BT = in_row(lengths, [[n] * length for n, length in enumerate(lengths, 1)], left, right)
    positions_BT = in_row(lengths, [[*range(length)] for length in lengths], left, right)
    cu_seqlens = torch.tensor([*accumulate([left, *lengths, right], initial=0)], dtype=torch.int32)
    mask_BT = numbers_BT.clamp(max=1)
    for said in ((numbers_BT, None, None), (mask_BT, positions_BT, None), (mask_BT, None, cu_seqlens)):
        assert spans(tokens_BT, *said, []) == wanted


@given(st.lists(LENGTHS, min_size=1, max_size=3))
def test_lengths_of_what_was_collated_say_where_samples_are(rows: list[list[int]]) -> None:
    """TRL packs rows of several samples and keeps their lengths in ``seq_lengths``; its collator leaves them out."""
    longest = max(map(sum, rows))
    tokens_BT = torch.arange(len(rows) * longest).view(len(rows), longest)
    mask_BT = torch.tensor([[1] * sum(row) + [0] * (longest - sum(row)) for row in rows])
    wanted = [(r, a, b) for r, row in enumerate(rows) for a, b in pairwise(accumulate(row, initial=0))]
    collate = RememberingCollator(lambda samples: {"input_ids": tokens_BT})
    try:
        collate([{"input_ids": [0] * sum(row), "seq_lengths": row} for row in rows])
        known = lengths_of(tokens_BT)
    finally:
        forget()
    assert known == [length for row in rows for length in row]
    assert spans(tokens_BT, mask_BT, None, None, known) == wanted


def test_of_equal_batches_the_last_one_is_meant() -> None:
    collate = RememberingCollator(lambda samples: {"input_ids": torch.ones(1, 6, dtype=torch.int64)})
    try:
        for lengths in ([2, 4], [5, 1]):
            collate([{"input_ids": [1] * length} for length in lengths])
        assert lengths_of(torch.ones(1, 6, dtype=torch.int64)) == [5, 1]
    finally:
        forget()


@pytest.mark.parametrize(("left", "right"), [(0, 2), (2, 0)])
def test_a_row_that_was_cut_ends_with_its_tokens(left: int, right: int) -> None:
    """A sample of nine tokens of which a collator kept four, beside one of three: rows of their own."""
    mask_BT = torch.tensor([[1] * 4, [0] * (left // 2) + [1] * 3 + [0] * (right // 2)])
    wanted = [(0, 0, 4), (1, left // 2, left // 2 + 3)]
    assert spans(torch.zeros(2, 4, dtype=torch.int64), mask_BT, None, None, [9, 3]) == wanted


def test_the_token_that_ends_a_sample_is_its_last() -> None:
    tokens_BT = torch.tensor([[95, 4, 95, 95, 7, 95], [8, 3, 1, 95, 2, 0]])
    mask_BT = torch.tensor([[1] * 6, [1] * 5 + [0]])
    wanted = [(0, 0, 1), (0, 1, 3), (0, 3, 4), (0, 4, 6), (1, 0, 4), (1, 4, 5)]
    assert spans(tokens_BT, mask_BT, None, None, [], border=95) == wanted
