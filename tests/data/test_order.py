import itertools
import json
import math
from itertools import pairwise

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.samples.order import BatchSize, SampleOrder, permute
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.one_of(st.integers(1, 40), st.integers(1020, 1030), st.integers(1, 5000))
SEEDS = st.integers(0, 2**64)


def taken(order, counts):
    indices = []
    for count in counts:
        batch, order = order.take(count)
        indices += batch.tolist()
    return indices, order


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_visits_every_sample_once(size, seed, epoch):
    indices, after = SampleOrder(size, seed, epoch).take(size)
    assert indices.dtype == np.int64
    assert sorted(indices.tolist()) == list(range(size))
    assert (after.epoch, after.consumed) == (epoch + 1, 0)


@given(size=SIZES, seed=SEEDS, cuts=st.lists(st.integers(1, 700), max_size=12))
def test_the_order_of_samples_does_not_depend_on_the_batch_size(size, seed, cuts):
    indices, after = taken(SampleOrder(size, seed), cuts)
    epochs = [SampleOrder(size, seed, epoch).take(size)[0].tolist() for epoch in range(after.epoch + 1)]
    assert indices == list(itertools.chain(*epochs))[: len(indices)]
    assert after.epoch * size + after.consumed == len(indices)


@given(size=SIZES, seed=SEEDS, before=st.lists(st.integers(1, 100), max_size=6), then=st.lists(st.integers(1, 100)))
def test_a_saved_order_continues_as_if_never_stopped(size, seed, before, then):
    _, stopped = taken(SampleOrder(size, seed), before)
    resumed = SampleOrder.from_state(json.loads(json.dumps(stopped.state())), size)
    assert taken(resumed, then) == taken(stopped, then)


@given(size=SIZES, count=st.integers(1, 6000))
def test_a_batch_never_mixes_epochs(size, count):
    order = SampleOrder(size, 3)
    for _ in range(5):
        indices, after = order.take(count)
        assert len(indices) == min(count, size - order.consumed)
        assert len(set(indices.tolist())) == len(indices)
        order = after


@pytest.mark.parametrize("size", [1025, 65_537, 1_000_000, (1 << 40) + 1])
def test_lazy_order_spreads_evenly_and_forgets_positions(size):
    draws = 1000 if size < 2000 else 50_000
    indices = permute(np.arange(draws), size, seed=11, epoch=2)
    scaled = indices / size
    counts = np.bincount((scaled * 64).astype(int), minlength=64)
    chi2 = ((counts - draws / 64) ** 2).sum() / (draws / 64)
    assert chi2 < 63 + 6 * math.sqrt(2 * 63)  # six standard deviations of chi-square with 63 degrees of freedom
    for other in (np.arange(draws), scaled[np.r_[1:draws, 0]], permute(np.arange(draws), size, 11, 3)):
        assert abs(np.corrcoef(scaled, other)[0, 1]) < 6 / math.sqrt(draws)


def test_every_order_of_four_samples_is_about_as_frequent():
    counts = {}
    for seed in range(2400):
        drawn = tuple(permute(np.arange(4), 4, seed, 0).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    assert len(counts) == 24
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 23 + 6 * math.sqrt(2 * 23)


def test_the_order_is_the_one_that_was_saved_by_earlier_versions():
    # Frozen: changing these numbers silently reorders every run that resumes; rename ALGORITHM instead.
    assert SampleOrder(10, 1234).take(10)[0].tolist() == [3, 2, 4, 0, 1, 7, 8, 5, 6, 9]
    assert SampleOrder(1_000_000, 1234, 5, 77).take(4)[0].tolist() == [765566, 805789, 286433, 211729]


def test_seed_and_epoch_are_not_interchangeable():
    assert permute(np.arange(50), 5000, 1, 0).tolist() != permute(np.arange(50), 5000, 0, 1).tolist()


def test_another_data_set_is_refused():
    state = SampleOrder(100, 1).state()
    with pytest.raises(EvenloadError, match="101 samples now, 100 when it was saved"):
        SampleOrder.from_state(state, 101)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "feistel-0"}, "another version"),
        ({"algorithm": None}, "another version"),
        ({"seed": "7"}, "damaged"),
        ({"consumed": None}, "damaged"),
        ({"epoch": True}, "damaged"),
        ({"consumed": 100}, "out of range"),
        ({"epoch": -1}, "out of range"),
    ],
)
def test_a_damaged_state_is_refused(change, message):
    with pytest.raises(EvenloadError, match=message):
        SampleOrder.from_state({**SampleOrder(100, 1).state(), **change}, 100)


def test_nothing_to_order_and_nothing_to_take_are_refused():
    with pytest.raises(EvenloadError, match="no sample"):
        SampleOrder(0, 1)
    with pytest.raises(EvenloadError, match="batch needs samples"):
        SampleOrder(5, 1).take(0)


LENGTHS = np.random.default_rng(3).integers(2, 60, 700)


def drawn(size, lengths, seed, steps):
    """The batches, each from a state that went through JSON."""
    order, batches = SampleOrder(len(lengths), seed), []
    for _ in range(steps):
        samples, order = size.take(order, lengths)
        order = SampleOrder.from_state(json.loads(json.dumps(order.state())), len(lengths))
        batches.append(samples.tolist())
    return batches


@given(st.lists(st.integers(2, 90), min_size=1, max_size=50), st.integers(1, 400), st.integers(0, 9))
def test_a_batch_stops_with_the_sample_that_reaches_its_tokens(lengths, tokens, seed):
    array, size = np.array(lengths), BatchSize(64, tokens)
    batches = drawn(size, array, seed, size.steps(array, seed, epochs=2))
    assert sorted(sample for batch in batches for sample in batch) == sorted(2 * list(range(len(lengths))))
    left = len(lengths)
    for batch in batches:
        left -= len(batch)
        assert array[batch[:-1]].sum() < tokens
        assert array[batch].sum() >= tokens or not left, "the last batch of an epoch takes what is left"
        left = left or len(lengths)


def test_long_batches_are_what_one_sample_after_the_other_gives():
    batches = drawn(BatchSize(64, 15_000), LENGTHS, 1, 2)
    order, _ = SampleOrder(len(LENGTHS), 1).take(len(LENGTHS))
    ends = [sum(map(len, batches[:k])) for k in range(3)]
    assert ends[1] > 256, "more than the first guess"
    assert [order[a:b].tolist() for a, b in pairwise(ends)] == batches


@given(st.integers(1, 60_000), st.sampled_from([BatchSize(64), BatchSize(1000), BatchSize(64, 900)]))
def test_steps_of_tokens_are_those_that_draw_them(tokens, size):
    steps = size.steps(LENGTHS, 5, tokens=tokens)
    reached = np.cumsum([LENGTHS[batch].sum() for batch in drawn(size, LENGTHS, 5, steps)])
    assert reached[-1] >= tokens
    assert steps == 1 or reached[-2] < tokens


def test_epochs_of_samples_need_no_draw_and_too_many_others_are_refused():
    assert BatchSize(64).steps(LENGTHS, 5, epochs=10**9) == 11 * 10**9
    assert (BatchSize(64).mean_samples(LENGTHS), BatchSize(64, 90).mean_samples(LENGTHS)) == (64, 3)
    with pytest.raises(EvenloadError, match="cannot be counted"):
        BatchSize(64, 90).steps(LENGTHS, 5, epochs=10**9)
