"""Tenants on DeepSpeed: a frozen Hugging Face model, or a stage of one, in an engine without an optimizer, its linear
layers adapted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....runtime.adapters.adapters import Adapters
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.attention.pack import Pack
from ....runtime.stage.executor import Graph
from ....runtime.stage.offload import layers_of
from ....runtime.world.agreement import everyone
from ...host.scoring import LossCollector
from ...host.step import Step
from ...host.tenants import Tenants
from ...host.trained import Passed
from ..engine.ds_config import SHARDED
from ..engine.engine import Releases
from ..engine.host import DeepSpeedHost
from ..engine.model import enable_recomputing
from ..engine.stage import EngineStage, call_of
from ..pipeline.host import PipelineHost
from ..pipeline.model import StageModule
from ..pipeline.stage import PipelineStage
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

    def _logits_of(self, pack: Pack) -> Tensor:
        logits_TV: Tensor = self._engine.module(**call_of(pack)).logits[0]
        return logits_TV

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        self._releases.before_backward()
        torch.autograd.backward(graph.output)
        if self._offload is not None:
            self._offload.release_backward_leftovers()


class PipelineTenants(Tenants):
    """Each rank has the adapters of its own stage's layers; ranks of a stage own a run of each."""

    def __init__(self, host: PipelineHost, module: StageModule) -> None:
        super().__init__(host.device)
        self._host = host
        own = {id(parameter): name for name, parameter in module.global_parameters().items()}
        linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        names = {id(layer): own[id(layer.weight)].removesuffix(".weight") for layer in linears}
        host.engine = frozen_engine(module, host.recipe, host.layout.dp)
        grid = host.engine.grid
        stages = grid.get_pipe_parallel_group()
        self.frozen = frozenset(name for part in everyone(list(own.values()), stages) for name in part)
        blocks = blocks_of(module.blocks, names)
        here = [place.name for block in blocks for site in block.sites for place in site.places]
        adapted = [name for part in everyone(here, stages) for name in part]
        peers = AdapterPeers(grid.get_data_parallel_group(), stages)
        self.adapters = Adapters(blocks, adapted, peers, torch.float32, host.device)
        if host.engine.is_first_stage():
            module.forward_funcs[0].register_forward_hook(need_gradient)

    def passes(self, step: Step, collector: LossCollector) -> Passed:
        program = self._host.program_of(step.plan)
        return Passed(self._host.execute(step, program, FrozenPipelineStage(self._host, step, collector)))


class FrozenPipelineStage(PipelineStage):
    """The passes of a frozen stage; the collector takes their losses down."""

    def __init__(self, host: PipelineHost, step: Step, collector: LossCollector) -> None:
        super().__init__(host, step, weight=1.0, collector=collector)

    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        torch.autograd.backward(graph.output, gradient)
        return None if graph.received is None else graph.received.grad

    def _through(self, received: Tensor | None, pack: Pack, **how: Any) -> Tensor:
        output: Tensor = self._engine.module(received, pack, **how)
        return output
