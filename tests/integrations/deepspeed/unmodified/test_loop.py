"""A script's engine used in ways that planned loading cannot honour: loud errors, and everything back in its place."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_misuse_is_refused_and_nothing_is_left(on_ranks):
    (told,) = on_ranks(1, "script_jobs.misuse")
    wanted = {
        "unknown key": "did you mean 'packing'",
        "unmanaged": "managed_gradient_accumulation",
        "other keys": "a batch without input_ids, labels",
        "too long": "longer than",
        "other tokens": "did not hand out",
        "two forwards": "before the backward",
        "step without backward": "engine.backward",
        "disabled inside an epoch": "disabled inside an epoch",
    }
    for name, part in wanted.items():
        assert part in told[name], name
    # Five samples and two micro-batches a step: the fifth does not fill one.
    assert told["micro-batches"] == [4, 4]
    assert told["with mesh"] == 4
    loss, returned = told["returned"]
    assert returned == pytest.approx(loss / 2)
    assert told["attention"] == ["evenload", "sdpa"]
    assert told["stock again"] == "DeepSpeedDataLoader"
    assert told["methods"] == ["function"] * 4
