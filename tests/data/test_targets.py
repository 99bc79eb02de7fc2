"""Targets of samples: counted from spans as they would be from the labels themselves, whatever is cut."""

import numpy as np
from evenload.data.samples.cut import IGNORE, TargetSpans, cut, spans_of, with_targets
from hypothesis import given
from hypothesis import strategies as st

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


def test_without_spans_nothing_is_touched():
    samples = cut(np.array([3, 9]), 4, "split", 2)
    assert with_targets(samples, np.array([3, 9]), None) is samples


def test_padding_behind_the_last_target_is_no_part_of_a_sample():
    lengths = np.array([100])
    labels = np.full(100, IGNORE)
    labels[3:5] = 1
    start, stop = spans_of(labels)
    samples = with_targets(cut(lengths, None, "split", 2), lengths, TargetSpans(np.array(start), np.array(stop)))
    assert samples.length.tolist() == [5]
    assert samples.targets.tolist() == [2]
    assert samples.tokens_left_out == 95
