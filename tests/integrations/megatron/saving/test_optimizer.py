"""Where the states of a distributed optimizer with several buckets are put before parameters are looked for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from harness.lazy import LazyModule

ours = LazyModule("evenload.integrations.megatron.saving.optimizer")
theirs = LazyModule("megatron.core.optimizer.distrib_optimizer")


def optimizer():
    """A distributed optimizer of two buffers, of which the second has three buckets, padded to multiples of 4."""
    part = object.__new__(theirs.DistributedOptimizer)
    first = SimpleNamespace(numel=4, buckets=[bucket(0, 3)])
    part.buffers = [first, SimpleNamespace(numel=16, buckets=[bucket(0, 3), bucket(4, 4), bucket(8, 5)])]

    def gather(empty_data: bool = False):
        if empty_data:
            return None
        names = ("param", "exp_avg", "exp_avg_sq")
        numbers = [{name: torch.arange(1.0, 1 + size) for name in names} | {"numel_unpadded": size} for size in (3, 12)]
        return {"buckets_coalesced": True} | {place: {"float": each} for place, each in enumerate(numbers)}

    part.get_parameter_state_dp_zero = gather
    return part


def bucket(offset, size):
    return SimpleNamespace(offset=offset, numel_unpadded=size)


def test_values_stand_where_their_parameters_are_and_padding_is_zero():
    for given in (optimizer(), SimpleNamespace(chained_optimizers=[SimpleNamespace(), optimizer()])):
        (part,) = [one for one in getattr(given, "chained_optimizers", [given]) if hasattr(one, "buffers")]
        plain = part.get_parameter_state_dp_zero
        with ours.states_in_their_places(given):
            state = part.get_parameter_state_dp_zero()
            assert part.get_parameter_state_dp_zero(empty_data=True) is None, "ranks without states"
        assert state["buckets_coalesced"]
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert state[0]["float"][name].tolist() == [1, 2, 3, 0]
            assert state[1]["float"][name].tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0]
        assert (state[0]["float"]["numel_unpadded"], state[1]["float"]["numel_unpadded"]) == (3, 12)
        assert part.get_parameter_state_dp_zero is plain
