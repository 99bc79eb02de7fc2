"""Tenants on DeepSpeed's pipelines: the frozen layers of a stage in a `PipelineEngine` without an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....core.plan.in_step import Program
from ....core.plan.program import lower
from ....core.plan.step_plan import StepPlan
from ....runtime.adapters.adapters import Adapters
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.attention.pack import Pack
from ....runtime.stage.executor import Graph, StageTrainer
from ....runtime.world.agreement import everyone
from ...host.foreign_plans import refuse_foreign
from ..pipeline.host import PipelineHost
from ..pipeline.model import StageModule
from ..pipeline.stage import PipelineStage
from .frozen import blocks_of, frozen_engine, need_gradient
from .host import EngineTenants
from .stage import booked_loss


class PipelineTenants(EngineTenants, PipelineHost):
    """Each rank has the adapters of its own stage's layers; ranks of a stage own a run of each."""

    def _open_engine(self, module: StageModule) -> None:
        own = {id(parameter): name for name, parameter in module.global_parameters().items()}
        linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        names = {id(layer): own[id(layer.weight)].removesuffix(".weight") for layer in linears}
        self.engine = frozen_engine(module, self.recipe, self.layout.dp)
        grid = self.engine.grid
        stages = grid.get_pipe_parallel_group()
        self.frozen = frozenset(name for part in everyone(list(own.values()), stages) for name in part)
        blocks = blocks_of(module.blocks, names)
        here = [place.name for block in blocks for site in block.sites for place in site.places]
        adapted = [name for part in everyone(here, stages) for name in part]
        peers = AdapterPeers(grid.get_data_parallel_group(), stages)
        self.adapters = Adapters(blocks, adapted, peers, torch.float32, self.device)
        if self.engine.is_first_stage():
            module.forward_funcs[0].register_forward_hook(need_gradient)

    def _program(self, plan: StepPlan) -> tuple[Program, tuple[str, ...]]:
        refuse_foreign(plan, self.layout.dp, self.layout.pp)
        return lower(plan, self.pipeline_stage, self.dp_cp_rank), ()

    def _trainer(self, **of_step: Any) -> StageTrainer:
        return FrozenPipelineStage(self.engine, **of_step)


class FrozenPipelineStage(PipelineStage):
    """The passes of a frozen stage; the book takes their losses down."""

    def __init__(self, engine: Any, **of_step: Any) -> None:
        super().__init__(engine, weight=1.0, **of_step)

    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        torch.autograd.backward(graph.output, gradient)
        return None if graph.received is None else graph.received.grad

    def _through(self, received: Tensor | None, pack: Pack, **how: Any) -> Tensor:
        output: Tensor = self._engine.module(received, pack, **how)
        return output

    def _sum(self, logits_TV: Tensor, pack: Pack) -> Tensor:
        assert self._book is not None
        return booked_loss(logits_TV, pack, self._book)
