"""What `evenload audit` remarks on in samples that are computed as they should be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from evenload.plugins.audit.remarks import HeldSamples, remarks  # noqa: E402


def held(*samples: list[int], trained: slice = slice(0, -1)) -> HeldSamples:
    pairs = []
    for sample in samples:
        is_trained = torch.zeros(len(sample), dtype=torch.bool)
        is_trained[trained] = True
        pairs.append((torch.tensor(sample), is_trained))
    return HeldSamples.of(pairs)


def test_ordinary_samples_are_nothing_to_remark_on():
    assert remarks([held([1, 2, 3], [4, 5]), held([1, 2, 4], [5, 4])]) == []
    assert remarks([held([1, 2, 3], [1, 2, 3])]) == [], "a sample that a rank draws twice is its own affair"
    assert remarks([]) == []


def test_ranks_that_read_the_same_rows():
    same = held([1, 2, 3], [4, 5], [6, 7, 8])
    (said,) = remarks([same, same])
    assert said.startswith("ranks hold the same 3 of 3 samples")
    assert remarks([same, held([1, 2, 3], [9, 9], [9, 8])]) == [], "one in five may come by chance"


def test_ends_that_no_sample_trains():
    (said,) = remarks([held([1, 2, 3], trained=slice(0, 1)), held([4, 5, 6], trained=slice(0, 1))])
    assert "no sample trains its last token" in said
    assert remarks([held([1, 2, 3], trained=slice(0, 1)), held([4, 5, 6])]) == []


def test_targets_of_one_token():
    (said,) = remarks([held([7] * 30 + [1, 2, 3, 4])])
    assert said.startswith("88% of targets are token 7")  # 29 of 33
    assert remarks([held([7] * 12)]) == [], "too few to tell"
