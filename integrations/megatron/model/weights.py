"""Parameters by their global name, and the same initial weights on every layout.

Megatron's own initialisation draws from a stream, so another number of tensor or pipeline ranks gives other weights.
Here each matrix is drawn whole from a generator seeded by (seed, global name) and then cut as Megatron cuts it: DP, TP,
PP and EP variants of a recipe start from the same numbers, and their losses can be compared step by step.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from .sharded_experts import SHARDS, ShardedExperts
from .v_shape import stages_of

EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^(.*\blayers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"^(.*\.local_experts\.)(\d+)(\..*)$")
_INTO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")


def global_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of this rank's part of a bare model; layers and experts are numbered over the whole model from
    0. The last stage's own copy of a tied embedding has the embedding's name."""
    for gpt in stages_of(model):
        for name, parameter in gpt.named_parameters():
            if getattr(parameter, "shared", False):
                name = EMBEDDING
            if match := _LAYER.match(name):
                head, index, tail = match.groups()
                layer = gpt.decoder.layers[int(index)]
                if _EXPERT.match(tail):
                    tail = _renumbered(tail, layer.mlp.local_expert_indices[0])
                name = f"{head}{layer.layer_number - 1}{tail}"
            yield name, parameter


def global_tensors(
    model: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor], *, trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """(name, what ``tensor_of`` gives for the parameter) of this pipeline stage, named as `global_parameters`: of
    experts that are cut over their group, too, each whole at its home. Collective over such groups. ``trained``: frozen
    parameters are left out."""
    modules = sharded_experts(model)
    for name, parameter in global_parameters(model):
        if trained and not parameter.requires_grad:
            continue
        if parameter in modules:
            experts = modules[parameter]
            yield from zip(names_at_home(experts, name), experts.at_home(tensor_of(parameter)), strict=True)
        else:
            yield name, tensor_of(parameter)


def sharded_experts(model: nn.Module) -> dict[nn.Parameter, ShardedExperts]:
    """Experts that are cut over their group, by the parameter of their pieces."""
    return {module.shards: module for module in model.modules() if isinstance(module, ShardedExperts)}


def names_at_home(experts: ShardedExperts, name: str) -> list[str]:
    """Global names of what `ShardedExperts.at_home` gives; ``name``: that of the pieces."""
    head, first = name.removesuffix(SHARDS), dist.get_rank(experts.group) * len(experts.local_experts)
    return [_renumbered(f"{head}.{of_expert}", first) for of_expert, _ in experts.home.named_parameters()]


def global_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, gradient in DDP's buffer) of what this pipeline stage trains, as `global_tensors`."""
    return global_tensors(model, lambda parameter: cast(Any, parameter).main_grad.detach(), trained=True)


def _renumbered(name: str, first: int) -> str:
    """The name of an expert's parameter by the expert's number in the layer."""
    return _EXPERT.sub(lambda match: f"{match[1]}{first + int(match[2])}{match[3]}", name)


@torch.no_grad()
def initialise(model: nn.Module, config: TransformerConfig, seed: int, tp_rank: int) -> None:
    """Fill every matrix of this stage: normal(0, ``init_method_std``), and std / sqrt(2 layers) into the residual.

    Vectors (norms, biases) keep what their modules set: ones and zeros, the same on every layout. The draw is made on
    the CPU in float32, so devices and dtypes agree, too, up to their rounding.
    """
    tp_size, std = config.tensor_model_parallel_size, config.init_method_std
    for name, parameter in global_parameters(model):
        if parameter.dim() < 2:
            continue
        generator = torch.Generator().manual_seed(_seed_of(name, seed))
        scale = std / math.sqrt(2 * config.num_layers) if name.endswith(_INTO_RESIDUAL) else std
        whole = torch.empty(whole_shape(parameter, tp_size)).normal_(0.0, scale, generator=generator)
        parameter.copy_(shard(whole, parameter, tp_rank, tp_size))


def whole_shape(parameter: Any, tp_size: int) -> list[int]:
    """Shape of the parameter before tensor parallelism cut it."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tp_size
    return shape


def shard(whole: Tensor, parameter: Any, tp_rank: int, tp_size: int) -> Tensor:
    """The part of ``whole`` that this tensor-parallel rank holds: of a gated layer, which keeps gate and value one
    after the other (stride 2), a piece of each."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    pieces = whole.chunk(tp_size * parameter.partition_stride, dim)
    return torch.cat(pieces[tp_rank::tp_size], dim)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
