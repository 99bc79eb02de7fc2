from typing import get_args

import numpy as np
import pytest
from evenload.core.errors import EvenloadError
from evenload.data.samples.cut import IGNORE, LongSamples, TargetSpans, cut, spans_of, with_targets
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(0, 60), max_size=30).map(lambda lengths: np.array(lengths, dtype=np.int64))


@given(
    lengths=LENGTHS,
    limits=st.tuples(st.integers(1, 20), st.integers(0, 20)),
    policy=st.sampled_from(get_args(LongSamples)),
)
def test_no_token_is_repeated_and_every_lost_one_is_counted(lengths, limits, policy):
    min_length, max_length = limits[0], sum(limits)
    samples = cut(lengths, max_length, policy, min_length)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for document, start, length in zip(samples.document, samples.start, samples.length, strict=True):
        assert min_length <= length <= max_length
        assert start + length <= lengths[document]
        seen[document][start : start + length] += 1
    uses = np.concatenate(seen) if seen else np.zeros(0, dtype=int)
    assert uses.max(initial=0) <= 1
    assert (uses == 0).sum() == samples.tokens_left_out
    assert samples.counts["empty"] == (lengths == 0).sum()


@given(lengths=LENGTHS, max_length=st.integers(1, 20))
def test_splitting_keeps_every_token_where_any_remainder_is_long_enough(lengths, max_length):
    samples = cut(lengths, max_length, "split", min_length=1)
    assert samples.tokens_left_out == 0
    assert samples.counts["split"] == (lengths > max_length).sum()
    assert list(zip(samples.document, samples.start, strict=True)) == [
        (document, start) for document, length in enumerate(lengths) for start in range(0, length, max_length)
    ]


def test_each_policy_counts_what_it_did():
    lengths = np.array([10, 21, 1, 0, 3])
    truncated, split, dropped = (cut(lengths, 10, policy, 2) for policy in ("truncate", "split", "drop"))
    assert truncated.length.tolist() == [10, 10, 3]
    assert (truncated.counts["truncated"], truncated.counts["too_short"], truncated.tokens_left_out) == (1, 1, 12)
    assert split.length.tolist() == [10, 10, 10, 3]
    assert (split.counts["split"], split.counts["too_short"], split.tokens_left_out) == (1, 2, 2)
    assert dropped.length.tolist() == [10, 3]
    assert (dropped.counts["dropped"], dropped.counts["too_short"], dropped.tokens_left_out) == (1, 1, 22)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((10, "splitt", 2), "did you mean 'split'"),
        ((10, "split", 0), "min_length=0"),
        ((1, "split", 2), "max_length=1, min_length=2"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(EvenloadError, match=message):
        cut(np.array([5]), *settings)


DOCUMENTS = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=8)


def spans(documents):
    pairs, first = [], 0
    for document in documents:
        pairs.append(spans_of(np.where(document, 7, IGNORE) if document else np.zeros(0, dtype=np.int64), first))
        first += len(document)
    start, stop = (np.array([place for pair in pairs for place in pair[side]], dtype=np.int64) for side in (0, 1))
    return TargetSpans(start, stop)


@given(DOCUMENTS, st.one_of(st.none(), st.integers(2, 7)), st.sampled_from(["truncate", "split", "drop"]))
def test_samples_have_the_targets_of_their_labels_and_end_behind_the_last(documents, max_length, long_samples):
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    before = cut(lengths, max_length, long_samples, 2)
    samples = with_targets(before, lengths, spans(documents))
    assert len(samples.length) == len(before.length)
    for document, start, length, whole, targets in zip(
        samples.document, samples.start, samples.length, before.length, samples.targets, strict=True
    ):
        labels = documents[document][start : start + whole]
        assert targets == sum(labels[1:])
        if targets:
            assert labels[length - 1]
            assert not any(labels[length:])
        else:
            assert length == whole
    assert samples.tokens_left_out + samples.length.sum() == lengths.sum()
