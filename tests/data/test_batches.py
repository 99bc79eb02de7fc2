"""Global batches by samples and by tokens, and how many of them epochs and tokens are."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.samples.order import BatchSize, SampleOrder
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = np.random.default_rng(3).integers(2, 60, 700)


def drawn(size: BatchSize, lengths: np.ndarray, seed: int, steps: int) -> list[list[int]]:
    """The batches, each from a state that went through JSON."""
    order, batches = SampleOrder(len(lengths), seed), []
    for _ in range(steps):
        samples, order = size.take(order, lengths)
        order = SampleOrder.from_state(json.loads(json.dumps(order.state())), len(lengths))
        batches.append(samples.tolist())
    return batches


@given(st.lists(st.integers(2, 90), min_size=1, max_size=50), st.integers(1, 400), st.integers(0, 9))
def test_a_batch_stops_with_the_sample_that_reaches_its_tokens(lengths: list[int], tokens: int, seed: int) -> None:
    array, size = np.array(lengths), BatchSize(64, tokens)
    batches = drawn(size, array, seed, size.steps(array, seed, epochs=2))
    assert sorted(sample for batch in batches for sample in batch) == sorted(2 * list(range(len(lengths))))
    left = len(lengths)
    for batch in batches:
        left -= len(batch)
        assert array[batch[:-1]].sum() < tokens
        assert array[batch].sum() >= tokens or not left, "the last batch of an epoch takes what is left"
        left = left or len(lengths)


def test_long_batches_are_what_one_sample_after_the_other_gives() -> None:
    batches = drawn(BatchSize(64, 15_000), LENGTHS, 1, 2)
    order, _ = SampleOrder(len(LENGTHS), 1).take(len(LENGTHS))
    ends = [sum(map(len, batches[:k])) for k in range(3)]
    assert ends[1] > 256, "more than the first guess"
    assert [order[a:b].tolist() for a, b in pairwise(ends)] == batches


@given(st.integers(1, 60_000), st.sampled_from([BatchSize(64), BatchSize(1000), BatchSize(64, 900)]))
def test_steps_of_tokens_are_those_that_draw_them(tokens: int, size: BatchSize) -> None:
    steps = size.steps(LENGTHS, 5, tokens=tokens)
    reached = np.cumsum([LENGTHS[batch].sum() for batch in drawn(size, LENGTHS, 5, steps)])
    assert reached[-1] >= tokens
    assert steps == 1 or reached[-2] < tokens


def test_epochs_of_samples_need_no_draw_and_too_many_others_are_refused() -> None:
    assert BatchSize(64).steps(LENGTHS, 5, epochs=10**9) == 11 * 10**9
    assert (BatchSize(64).mean_samples(LENGTHS), BatchSize(64, 90).mean_samples(LENGTHS)) == (64, 3)
    with pytest.raises(EvenloadError, match="cannot be counted"):
        BatchSize(64, 90).steps(LENGTHS, 5, epochs=10**9)
