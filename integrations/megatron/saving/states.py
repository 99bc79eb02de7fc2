"""What Megatron's optimizers hold of each parameter, made whole again over the data-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from ...reference.textbook import AdamState
from ..model.weights import global_tensors

ROWS = "param", "exp_avg", "exp_avg_sq"
"""What Megatron's distributed optimizer calls weight, first and second moment."""


def optimizer_states(model: nn.Module, optimizer: Any) -> dict[str, AdamState]:
    """Weights in the optimizer's precision and Adam's moments of what this stage trains, by global name, on the CPU.

    Tensor-parallel shards are those of this rank. Collective over the data-parallel ranks.
    """
    rows = {p: rows_of(optimizer, p).cpu() for p in model.parameters() if p.requires_grad}

    def part(number: int) -> dict[str, Tensor]:
        return dict(global_tensors(model, lambda p: rows[p][number].view(p.shape), trained=True))

    parts = [part(number) for number in range(3)]
    return {name: AdamState(*(values[name].cpu() for values in parts)) for name in parts[0]}


@torch.no_grad()
def rows_of(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """[3, values]: weight, first and second moment. Experts on expert-parallel ranks have an optimizer of their own."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            if any(parameter in buffer.param_index_map for buffer in part.buffers):
                return _sharded(part, parameter)
        elif getattr(parameter, "main_param", parameter) in part.optimizer.state:
            return _whole(part, parameter)
    raise AssertionError("a parameter without an optimizer")


@torch.no_grad()
def write_rows(optimizer: Any, parameter: nn.Parameter, rows: Tensor) -> None:
    """Set what `rows_of` gives, each rank its own part of it."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            if parameter in part.model_param_group_index_map:
                shard = part._get_model_param_range_map(parameter)["param"]
                held = part._get_main_param_and_optimizer_states(parameter)
                for row, name in zip(rows, ROWS, strict=True):
                    held[name].copy_(row[shard.start : shard.end].view_as(held[name]))
        elif getattr(parameter, "main_param", parameter) in part.optimizer.state:
            own = getattr(parameter, "main_param", parameter)
            state = part.optimizer.state[own]
            for row, tensor in zip(rows, (own, state["exp_avg"], state["exp_avg_sq"]), strict=True):
                tensor.copy_(row.view_as(tensor))


def _whole(part: Any, parameter: nn.Parameter) -> Tensor:
    own = getattr(parameter, "main_param", parameter)  # a float32 copy where the model runs in half precision
    state = part.optimizer.state[own]
    return torch.stack([own.detach().flatten(), state["exp_avg"].flatten(), state["exp_avg_sq"].flatten()])


def _sharded(part: Any, parameter: nn.Parameter) -> Tensor:
    rows = torch.zeros(3, parameter.numel(), dtype=torch.float32, device=parameter.device)
    if parameter in part.model_param_group_index_map:
        shard = part._get_model_param_range_map(parameter)["param"]
        held = part._get_main_param_and_optimizer_states(parameter)
        for row, name in zip(rows, ROWS, strict=True):
            row[shard.start : shard.end] = held[name].flatten()
    dist.all_reduce(rows, group=part.data_parallel_group)
    return rows
