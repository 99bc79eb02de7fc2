"""The exact planner on a device: the integers of the host's, on any counts."""

from __future__ import annotations

import numpy as np
import torch
from evenload.core.aliases import Ints
from evenload.core.experts.exact import exact_quotas
from evenload.runtime.experts.exact_on_device import exact_on_device
from hypothesis import given, settings
from hypothesis import strategies as st

from ...core.experts.drawn_counts import counts, policies


@given(counts(), st.data())
@settings(max_examples=200)
def test_integers_are_those_of_the_host(counts_RE: Ints, data: st.DataObject) -> None:
    policy = data.draw(policies(counts_RE))
    on_device = exact_on_device(torch.from_numpy(counts_RE), policy)
    assert on_device.dtype == torch.int64
    assert np.array_equal(on_device.numpy(), exact_quotas(counts_RE, policy))
