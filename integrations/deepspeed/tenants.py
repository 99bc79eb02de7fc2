"""Tenants on DeepSpeed: a frozen Hugging Face model, or a stage of one, in an engine without an optimizer, its linear
layers adapted.

    ZeRO 0, 1, 2    nothing is left that they divide or reduce: the engine puts the model on its device, and that is
                    all it does; it is made with ZeRO 0, as 1 and 2 refuse to stand without an optimizer
    ZeRO 3          the engine divides the frozen weights, and gathers and releases them in every pass
    pipelines       the engine gives the stages their layers and their process groups

Their passes are those of `engine.frozen`.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from ...core.recipe.recipe import Recipe
from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.places import linears_in
from ...runtime.stage.offload import layers_of
from ...runtime.world.agreement import everyone
from ..host.tenants import Tenants
from .engine.ds_config import SHARDED, ds_config
from .engine.engine import prepare_deepspeed
from .engine.frozen import blocks_of, linear_names, need_gradient, replay_first
from .engine.host import DeepSpeedHost
from .engine.model import enable_recomputing
from .pipeline.host import PipelineHost
from .pipeline.model import StageModule
from .pipeline.stage import stage_blocks


class DataParallelTenants(Tenants):
    """Adapters on a frozen model without pipeline stages, under ZeRO 0, 1, 2 or 3. Ranks run different numbers of
    micro-batches but under 3."""

    def __init__(self, host: DeepSpeedHost, model: Any) -> None:
        super().__init__(host.device, host.frozen_passes)
        names = linear_names(model)
        # Transformers' own hook for recomputation would have ZeRO 3 gather the embedding in every backward.
        model.disable_input_require_grads()
        self.frozen = frozenset(name for name, _ in model.named_parameters())
        host.engine = frozen_engine(model, host.recipe, host.world.size)
        module = host.engine.module
        blocks = blocks_of(layers := layers_of(module), names)
        self.adapters = Adapters(blocks, linears_in(blocks), host.adapter_peers(), torch.float32, host.device)
        module.get_input_embeddings().register_forward_hook(need_gradient)
        if host.recipe.deepspeed.zero_stage == SHARDED:
            enable_recomputing(module, layers)
            replay_first(layers)


class PipelineTenants(Tenants):
    """Each rank has the adapters of its own stage's layers; ranks of a stage own a run of each."""

    def __init__(self, host: PipelineHost, module: StageModule) -> None:
        super().__init__(host.device, host.frozen_passes)
        host.engine = frozen_engine(module, host.recipe, host.layout.dp)
        peers = host.adapter_peers()
        names = list(module.global_parameters())
        self.frozen = frozenset(name for part in everyone(names, peers.model) for name in part)
        blocks = stage_blocks(module)
        adapted = [name for part in everyone(linears_in(blocks), peers.model) for name in part]
        self.adapters = Adapters(blocks, adapted, peers, torch.float32, host.device)
        if host.engine.is_first_stage():
            module.forward_funcs[0].register_forward_hook(need_gradient)


def frozen_engine(model: nn.Module, recipe: Recipe, world_size: int) -> Any:
    """A `DeepSpeedEngine` around a model whose parameters get no gradients. Collective; needs a process group."""
    prepare_deepspeed()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = ds_config(recipe, world_size)
    if recipe.deepspeed.zero_stage != SHARDED:
        config["zero_optimization"] = {"stage": 0}
        if recipe.train.dtype == "bf16":
            # DeepSpeed's own bfloat16 comes with an optimizer; buffers keep their precision there, too.
            config["bf16"] = {"enabled": False}
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine
