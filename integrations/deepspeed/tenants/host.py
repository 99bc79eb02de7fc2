"""Tenants on DeepSpeed: a frozen Hugging Face model in an engine without an optimizer, its linear layers adapted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....runtime.adapters.adapters import Adapters
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.attention.pack import Pack
from ....runtime.stage.executor import Graph
from ....runtime.stage.offload import layers_of
from ...host.scoring import LossCollector
from ...host.step import Step
from ...host.tenants import Tenants
from ...host.trained import Passed
from ..engine.ds_config import SHARDED
from ..engine.engine import Releases
from ..engine.host import DeepSpeedHost
from ..engine.model import enable_recomputing
from ..engine.stage import EngineStage, call_of
from .frozen import blocks_of, frozen_engine, linear_names, need_gradient, replay_first


class DataParallelTenants(Tenants):
    """Adapters beside a frozen model without pipeline stages, under ZeRO 0, 1, 2 or 3. Ranks run different numbers of
    micro-batches but under 3."""

    def __init__(self, host: DeepSpeedHost, model: Any) -> None:
        super().__init__(host.device)
        self._host = host
        names = linear_names(model)
        # Transformers' own hook for recomputation would have ZeRO 3 gather the embedding in every backward.
        model.disable_input_require_grads()
        self.frozen = frozenset(name for name, _ in model.named_parameters())
        host.engine = frozen_engine(model, host.recipe, host.world.size)
        module = host.engine.module
        blocks = blocks_of(layers := layers_of(module), names)
        own = [place.name for block in blocks for site in block.sites for place in site.places]
        peers = AdapterPeers(dist.group.WORLD if host.world.size > 1 else None)
        self.adapters = Adapters(blocks, own, peers, torch.float32, host.device)
        module.get_input_embeddings().register_forward_hook(need_gradient)
        if host.recipe.deepspeed.zero_stage == SHARDED:
            enable_recomputing(module, layers)
            replay_first(layers)

    def passes(self, step: Step, collector: LossCollector) -> Passed:
        program, branches = self._host.program_of(step.plan, "none")
        return Passed(self._host.execute(step, program, FrozenStage(self._host, step, collector)), branches)


class FrozenStage(EngineStage):
    """The passes of a frozen model; the collector takes their losses down."""

    def __init__(self, host: DeepSpeedHost, step: Step, collector: LossCollector) -> None:
        self._releases = Releases(host.engine.module)
        super().__init__(host, step, self._releases, None, None, weight=1.0, collector=collector)
        self._offload = host.engine.optimizer

    def _loss_of(self, pack: Pack) -> Tensor:
        return self._sum(self._engine.module(**call_of(pack)).logits[0], pack)

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        self._releases.before_backward()
        torch.autograd.backward(graph.output)
        if self._offload is not None:
            self._offload.release_backward_leftovers()
