"""The states of Megatron's optimizers: whole by parameter, saved where they belong, loaded into as many parts as are.

With expert parallelism Megatron chains two optimizers, one of them for experts, and saves the state of each under its
number; on one expert-parallel rank there is one, saved as it is. Tensors are saved by parameter and reshard by
themselves; what lies next to them, the step and the settings of parameter groups, is carried over here.

Megatron-Core 0.16 gathers the states of a distributed optimizer's buffer bucket by bucket without the padding between
buckets, and then looks for each parameter where it lies with padding: all after the first bucket come out shifted, or
as zeros ("a bug in the param ranges logic", it says of what it finds missing). A tied embedding has a bucket of its
own, overlapped reduction one for every 40 million weights. Here the padding is put back before parameters are looked
for.

It has two more faults with torch's Adam. A load of the distributed optimizer looks for the Adam step among tensors that
do not hold it (KeyError). And every parameter is given the *same* step tensor, which Adam then counts up once per
parameter: the first resumed loss is right, the second wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from ....runtime.attributes import with_attributes
from ...reference.textbook import AdamState
from ..model.gpt import adam_states, parts_of
from ..model.weights import global_tensors

State = dict[Any, Any]

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
    """[3, values]: weight, first and second moment. Collective over the ranks that divide them."""
    for part in parts_of(optimizer):
        tensors, own = _held(part, parameter)
        if isinstance(part, DistributedOptimizer) and any(parameter in b.param_index_map for b in part.buffers):
            rows = torch.zeros(3, parameter.numel(), dtype=torch.float32, device=parameter.device)
            for row, tensor in zip(rows, tensors, strict=False):
                row[own] = tensor.flatten()
            dist.all_reduce(rows, group=part.data_parallel_group)
            return rows
        if tensors:
            return torch.stack([tensor.flatten() for tensor in tensors])
    raise AssertionError("a parameter without an optimizer")


@torch.no_grad()
def write_rows(optimizer: Any, parameter: nn.Parameter, rows: Tensor) -> None:
    """Set what `rows_of` gives, each rank its own part of it."""
    for part in parts_of(optimizer):
        tensors, own = _held(part, parameter)
        for row, tensor in zip(rows, tensors, strict=False):
            tensor.copy_(row[own].view_as(tensor))


def _held(part: Any, parameter: nn.Parameter) -> tuple[list[Tensor], slice]:
    """What a part of an optimizer has of a parameter on this rank, if anything, and which of its values these are."""
    if isinstance(part, DistributedOptimizer):
        if parameter not in part.model_param_group_index_map:
            return [], slice(0)
        shard = part._get_model_param_range_map(parameter)["param"]
        held = part._get_main_param_and_optimizer_states(parameter)
        return [held[name] for name in ROWS], slice(shard.start, shard.end)
    own = getattr(parameter, "main_param", parameter)  # a float32 copy where the model runs in half precision
    state = part.optimizer.state.get(own)
    return [own, state["exp_avg"], state["exp_avg_sq"]] if state else [], slice(None)


@torch.no_grad()
def write_row(optimizer: Any, parameter: nn.Parameter, number: int, row: Tensor) -> None:
    """Set one row of what `rows_of` gives, each rank its own part of it."""
    for part in parts_of(optimizer):
        tensors, own = _held(part, parameter)
        if tensors:
            tensors[number].copy_(row[own].view_as(tensors[number]))


@contextmanager
def states_in_their_places(optimizer: Any) -> Iterator[None]:
    """Holds around ``sharded_state_dict`` of a Megatron optimizer, chained or not."""
    with ExitStack() as stack:
        for part in parts_of(optimizer):
            if isinstance(part, DistributedOptimizer):
                gathered = _padded(part, part.get_parameter_state_dp_zero)
                stack.enter_context(with_attributes(part, get_parameter_state_dp_zero=gathered))
        yield


def _padded(part: Any, gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(**how: Any) -> Any:
        state = gather(**how)
        for number, buffer in enumerate(part.buffers if state is not None else ()):
            for of_dtype in state[number].values():
                for key, values in of_dtype.items():
                    if isinstance(values, Tensor):
                        of_dtype[key] = _with_padding(values, buffer)
        return state

    return gathered


def _with_padding(values: Tensor, buffer: Any) -> Tensor:
    """Values of a buffer's weights, one bucket after the other, where the buffer has them."""
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    padded = torch.zeros(buffer.numel, dtype=values.dtype)
    for bucket, part in zip(buffer.buckets, torch.split(values, sizes), strict=True):
        padded[bucket.offset : bucket.offset + len(part)] = part
    return padded


@torch.no_grad()
def load_optimizer(optimizer: Any, state: State) -> None:
    """``optimizer.load_state_dict(state)`` of a Megatron optimizer, right with torch's Adam, also where the state was
    saved in another number of parts: it is by the number of the part where there are several, here or there."""
    parts = parts_of(optimizer)
    for part, of_part in zip(parts, _states_of_parts(parts, state), strict=True):
        tensors = of_part.pop("param_state", None)
        part.load_state_dict(of_part)
        steps = [states.pop("step", None) for states in adam_states(part)]
        if tensors is not None:
            part.load_parameter_state_from_fully_reshardable(tensors)
        for states, step in zip(adam_states(part), steps, strict=True):
            if step is not None:
                states["step"] = step.clone()


def _states_of_parts(parts: Sequence[Any], state: State) -> list[State]:
    numbers = sorted(key for key in state if isinstance(key, int))
    alone = {key: value for key, value in state.items() if key not in numbers}
    if not numbers:
        return [alone]
    if not alone:
        return [state[number] for number in numbers]
    if len(parts) > 1:
        return [_adopted(part, alone, state[number]) for part, number in zip(parts, numbers, strict=True)]
    return [_adopted(parts[0], state[numbers[0]], alone)]


def _adopted(part: Any, saved: State, tensors: State) -> State:
    """The tensors of a part with what another part saved in addition to its own."""
    result: State = merge(deepcopy(saved), {key: value for key, value in tensors.items() if key != "param_groups"})
    holder, own = result.get("optimizer", result), part.state_dict()
    of_decay = {group["wd_mult"]: group for group in holder["param_groups"]}
    groups = own.get("optimizer", own)["param_groups"]
    kept = {"params", "is_expert_parallel"}
    holder["param_groups"] = [
        {**of_decay[group["wd_mult"]], **{key: group[key] for key in kept & group.keys()}} for group in groups
    ]
    return result
