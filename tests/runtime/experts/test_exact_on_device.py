"""The exact planner on a device: the integers of the host's, on any counts."""

import numpy as np
import pytest
import torch
from evenload.core.experts.exact import exact_quotas
from evenload.core.plan.expert_policy import ExpertPolicy
from evenload.runtime.experts.exact_on_device import exact_on_device
from hypothesis import given
from hypothesis import strategies as st

from ...core.experts.drawn_counts import counts, policies


@given(counts(), st.data())
def test_integers_are_those_of_the_host(counts_RE, data):
    policy = data.draw(policies(counts_RE))
    on_device = exact_on_device(torch.from_numpy(counts_RE), policy)
    assert on_device.dtype == torch.int64
    assert np.array_equal(on_device.numpy(), exact_quotas(counts_RE, policy))


@pytest.mark.parametrize("node_ranks", [0, 4])
def test_no_shape_and_no_step_depends_on_the_loads(node_ranks):
    """Tensors without data go through: nothing is read back on the host."""
    counts_RE = torch.empty((8, 32), dtype=torch.int64, device="meta")
    assert exact_on_device(counts_RE, ExpertPolicy("exact", 4, 1.01, node_ranks=node_ranks)).shape == (32, 8)
