"""Moments of several buckets lie where the buffer has its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def test_the_padding_between_buckets_is_put_back_for_every_tensor() -> None:
    from evenload.integrations.megatron.saving.buckets import _padded

    sizes, offsets = (5, 3, 4), (0, 8, 12)
    buckets = [SimpleNamespace(numel_unpadded=n, offset=at) for n, at in zip(sizes, offsets, strict=True)]
    part = SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets, numel=16)])
    values = torch.arange(1.0, 13.0)

    def gather(**_: Any) -> Any:
        return {0: {(torch.float32, torch.float32): {"param": values.clone(), "exp_avg": -values, "numel": 12}}}

    (state,) = _padded(part, gather)()[0].values()
    wanted = [1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0, 9, 10, 11, 12]
    assert state["param"].tolist() == wanted
    assert state["exp_avg"].tolist() == [-value for value in wanted]
    assert state["numel"] == 12
    assert _padded(part, lambda **_: None)() is None, "ranks that gather nothing"
