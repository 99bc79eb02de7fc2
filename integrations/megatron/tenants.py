"""Tenants on Megatron-Core: a frozen GPTModel without DDP and without an optimizer, its linear layers adapted."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.places import linears_in
from ..host.tenants import Tenants
from .adapted import adapter_peers, blocks_of
from .host import MegatronHost
from .model.gpt import DTYPES
from .model.weights import global_parameters


class MegatronTenants(Tenants):
    """The adapters of tenants on this process's part of a model. Every plan runs in the executor."""

    def __init__(self, host: MegatronHost, config: TransformerConfig) -> None:
        super().__init__(host.device, host.frozen_passes)
        recipe = host.recipe
        for parameter in host.model.parameters():
            parameter.requires_grad_(False)
        names = [name for name, _ in global_parameters(host.model)]
        self.frozen = frozenset(name for part in host.of_each_stage(names) for name in part)
        host.ddp = Float16Module(config, host.model) if recipe.train.dtype == "bf16" else host.model
        blocks = blocks_of(host.model, recipe, host.tp_rank)
        linears = [name for stage in host.of_each_stage(linears_in(blocks)) for name in stage]
        dtype = torch.promote_types(DTYPES[recipe.train.dtype], torch.float32)
        self.adapters = Adapters(blocks, linears, adapter_peers(host.tp_rank), dtype, host.device)
