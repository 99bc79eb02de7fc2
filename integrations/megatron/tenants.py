"""Tenants on Megatron-Core: a frozen GPTModel without DDP and without an optimizer, its linear layers adapted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from ...core.plan.program import lower
from ...core.recipe.recipe import Recipe
from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.peers import AdapterPeers
from ...runtime.adapters.places import AdaptedBlock, Place, Site
from ...runtime.attention.pack import Pack
from ...runtime.experts.routing import StepRouting
from ..host.scoring import LossCollector
from ..host.step import Step
from ..host.tenants import Tenants
from ..host.trained import Passed
from .host import MegatronHost
from .model.gpt import DTYPES
from .model.weights import global_parameters
from .pretrained.pieces import pieces_of
from .stage import reaching_recomputed

_LINEARS = tuple(f"{name}.weight" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


class MegatronTenants(Tenants):
    """The adapters of tenants beside this process's part of a model. Every plan runs in the executor."""

    def __init__(self, host: MegatronHost, config: TransformerConfig) -> None:
        super().__init__(host.device)
        self._host, recipe = host, host.recipe
        for parameter in host.model.parameters():
            parameter.requires_grad_(False)
        names = [name for name, _ in global_parameters(host.model)]
        self.frozen = frozenset(name for part in host.of_each_stage(names) for name in part)
        host.ddp = Float16Module(config, host.model) if recipe.train.dtype == "bf16" else host.model
        blocks = blocks_of(host.model, recipe, host.tp_rank)
        own = [place.name for block in blocks for site in block.sites for place in site.places]
        peers = AdapterPeers(
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_model_parallel_group(),
            counts=host.tp_rank == 0,
        )
        dtype = torch.promote_types(DTYPES[recipe.train.dtype], torch.float32)
        linears = [name for stage in host.of_each_stage(own) for name in stage]
        self.adapters = Adapters(blocks, linears, peers, dtype, host.device)

    def passes(self, step: Step, collector: LossCollector) -> Passed:
        host, plan = self._host, step.plan
        host.refuse_foreign(plan)
        routing = StepRouting(plan.lengths, labels=step.labels)
        step.mark("forward and backward")
        with reaching_recomputed(host.model):
            return Passed(host.carry_out(step, lower, host.forward_into(collector), routing))


def blocks_of(model: nn.Module, recipe: Recipe, tp_rank: int) -> list[AdaptedBlock]:
    """The decoder layers of this rank's stage, with the linear layers that Hugging Face's model of the family has."""
    gpt: Any = model
    modules = {id(m.weight): m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    sites: dict[str, Site] = {}
    for name, parameter in global_parameters(model):
        if name.endswith(_LINEARS):
            places = tuple(_places(name, parameter, recipe, tp_rank))
            sites[name] = Site(modules[id(parameter)], places, *_sums(parameter, recipe.parallel.tp))
    return [
        AdaptedBlock(layer, _pack_of, tuple(s for n, s in sites.items() if f"layers.{layer.layer_number - 1}." in n))
        for layer in gpt.decoder.layers
    ]


def _places(name: str, parameter: nn.Parameter, recipe: Recipe, tp_rank: int) -> Iterator[Place]:
    for piece in pieces_of(name, parameter, recipe, tp_rank):
        outputs, inputs = piece.shape
        columns = piece.columns or (0, inputs)
        layer = piece.name.removesuffix(".weight")
        yield Place(layer, outputs, inputs, piece.rows, columns, piece.groups, piece.first)


def _sums(parameter: Any, tp: int) -> tuple[Any, ...]:
    if tp == 1:
        return ()
    kind = "gradients" if parameter.partition_dim == 0 else "products"
    return kind, parallel_state.get_tensor_model_parallel_group()


def _pack_of(_: tuple[Any, ...], words: dict[str, Any]) -> Pack:
    pack: Pack = words["packed_seq_params"].pack
    return pack
