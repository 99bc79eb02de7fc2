"""A Hugging Face model of which a rank has memory for what it keeps: drawn from the seed, or read from a folder.

The whole is built without memory. Weights are drawn from one generator, layer after layer: what a part gets depends on
all that was drawn before it. So what is drawn fills memory of the moment, and the generator moves as usual; where it
stood before a weight, the weights that are wanted are drawn once more. The peak is the parts and the largest weight,
the time the whole's.

From a folder each module gets its parameters, and what the rank's engine does not keep whole leaves before the next
module comes:

    ZeRO 0 .. 2          every rank reads and keeps all of it, as it trains all of it
    parallel.ep          of the experts, a rank reads its own; memory of the others is never touched
    pipelines            a rank reads the layers of its stage
    ZeRO 3               rank 0 reads, DeepSpeed sends to all ranks and cuts; at most one module is whole anywhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ....core.recipe.recipe import Recipe
from ...huggingface.folders.conversion import ModelWeights
from ...huggingface.folders.reading import WeightFolder
from .ds_config import SHARDED, ds_config
from .engine import prepare_deepspeed

Parts = Callable[[Any], Iterable[nn.Module]]
"""Picks the modules of a model that are wanted."""

_OF_EXPERTS = 3
"""Axes of a parameter that holds a matrix of each expert."""


def build_partly(make: Callable[[], Any], parts: Parts) -> Any:
    """The model that `make` gives, its `parts` bit-equal; matrices and tables elsewhere are on the meta device.

    ``make``: builds a `PreTrainedModel` from the CPU's generator. Each of its modules draws its ``weight`` alone, and
    none is tied to another.
    """
    with _Drawing() as drawing:
        model = make()
    for module in (module for part in parts(model) for module in part.modules()):
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            state = drawing.before.get(id(module.weight))
            module.to_empty(device="cpu", recurse=False)
            if state is not None:
                torch.set_rng_state(state)
            with torch.no_grad():
                model._init_weights(module)
    return model


class WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Empty tensors are on the meta device; what is computed (tables of positions, ones) is there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        on_meta = {"device": "meta"} if func is torch.ops.aten.empty.memory_format else {}
        return func(*args, **{**(kwargs or {}), **on_meta})


class _Drawing(WithoutMemory):  # type: ignore[no-untyped-call]
    """Empty tensors get no memory; filling one at random moves the generator as if it had."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, torch.Tensor] = {}
        """State of the generator before a tensor was filled for the last time, by the tensor's id."""
        self._buffer = torch.empty(0)
        """For what is drawn; one for all, since memory given back between states that stay would not fit the next."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and args[0].is_meta:
            like = args[0]
            self.before[id(like)] = torch.get_rng_state()
            if len(self._buffer) < like.numel() or self._buffer.dtype != like.dtype:
                self._buffer = torch.empty(like.numel(), dtype=like.dtype)
            func(self._buffer[: like.numel()].view(like.shape), *args[1:], **kwargs)
            return like
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class Keeping:
    """What a rank keeps of a model that is read; by default all of it, in float32."""

    dtype: torch.dtype = torch.float32
    reads: bool = True
    """False: parameters get memory alone, and `leave` their values."""
    rows: Callable[[str, Tensor], slice | None] = lambda *_: None
    """Which rows of a parameter the rank will look at, by its name and shape; None: all."""
    leave: Callable[[Sequence[nn.Parameter]], None] = lambda _: None
    """Is given the parameters of each module once they are filled. Collective, if it is so."""


WHOLE = Keeping()


def read_model(make: Callable[[], Any], path: Path, parts: Parts | None, keeping: Keeping) -> Any:
    """The model that ``make`` builds, filled from a folder; ``parts``: the modules that are wanted, if not all.

    Raises EvenloadError: the folder is no such, or its tensors are not the model's.
    """
    with WithoutMemory():
        model = make()
    state = model.state_dict(keep_vars=True)  # keeps what is replaced, and so its ids
    weights = ModelWeights(WeightFolder.open(path), model)
    names = {id(tensor): name for name, tensor in state.items() if name in weights}
    filled: dict[int, nn.Parameter] = {}
    for module in (inner for part in ([model] if parts is None else parts(model)) for inner in _children_first(part)):
        fresh = []
        for own, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in filled:
                value = _value(weights, names[id(parameter)], parameter, keeping)
                fresh.append(nn.Parameter(value, requires_grad=parameter.requires_grad))
                filled[id(parameter)] = fresh[-1]
            module._parameters[own] = filled[id(parameter)]
        for own, buffer in module.named_buffers(recurse=False):
            if id(buffer) in names:
                module._buffers[own] = weights.read(names[id(buffer)]).to(buffer.dtype)
        keeping.leave(fresh)
    return model


def keeping_of(recipe: Recipe, rank: int, world_size: int) -> Keeping:
    """What a rank of DeepSpeed keeps of the model of a recipe without pipelines. Raises EvenloadError: see
    `ds_config`."""
    dtype = torch.bfloat16 if recipe.train.dtype == "bf16" else torch.float32
    if recipe.deepspeed.zero_stage == SHARDED:
        prepare_deepspeed()
        deepspeed.init_distributed()
        return Keeping(dtype, reads=rank == 0, leave=_Shards(ds_config(recipe, world_size)))
    return Keeping(dtype, rows=partial(_own_experts, ep=recipe.parallel.ep, rank=rank))


class _Shards:
    """Sends parameters from rank 0 to all and keeps a part on each, as ZeRO 3 has them. Collective."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._first: Any = None

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        if self._first is None:
            deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=self._config)
            self._first = parameters[0]
        else:
            self._first.convert_to_zero_parameters(param_list=list(parameters))


def _own_experts(name: str, parameter: Tensor, *, ep: int, rank: int) -> slice | None:
    """The experts of this rank among the rows of a parameter; None for one that is whole here."""
    if ep == 1 or ".experts." not in name or parameter.dim() != _OF_EXPERTS:
        return None
    each = len(parameter) // ep
    return slice(rank % ep * each, (rank % ep + 1) * each)


def _value(weights: ModelWeights, name: str, parameter: Tensor, keeping: Keeping) -> Tensor:
    if not keeping.reads:
        return torch.empty(parameter.shape, dtype=keeping.dtype)
    rows = keeping.rows(name, parameter)
    if rows is None:
        return weights.read(name).to(keeping.dtype)
    value = torch.empty(parameter.shape, dtype=keeping.dtype)  # takes memory where it is written
    value[rows] = weights.read(name, rows).to(keeping.dtype)
    return value


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
