"""Tenants on DeepSpeed's pipelines: the frozen layers of a stage in a `PipelineEngine` without an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.adapters.adapters import Adapters
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.attention.pack import Pack
from ....runtime.stage.executor import Graph
from ....runtime.world.agreement import everyone
from ...host.scoring import LossCollector
from ...host.step import Step
from ...host.tenants import Tenants
from ...host.trained import Passed
from ..pipeline.host import PipelineHost
from ..pipeline.model import StageModule
from ..pipeline.stage import PipelineStage
from .frozen import blocks_of, frozen_engine, need_gradient


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
