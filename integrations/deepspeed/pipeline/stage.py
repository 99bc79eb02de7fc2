"""A stage of DeepSpeed's `PipelineEngine` for the executor: packs of a Hugging Face model, the engine's own backward.

DeepSpeed's own schedule hands tensors on by sends that block and keeps one loss and one output gradient for the whole
engine, which allows 1F1B and nothing else. Here these are handed to the engine right before the backward that wants
them, and tensors travel over `runtime.stage.stage_links`, which never wait for a send.

Shape legend: T = slots of a pack, C = hidden, V = vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ....core.plan.action import Action, Program
from ....runtime.adapters.places import AdaptedBlock
from ....runtime.attention.pack import Pack
from ....runtime.attributes import with_attributes
from ....runtime.stage.deferred import WgradStore, deferring
from ....runtime.stage.executor import Graph
from ...host.scoring import LossCollector
from ...host.step import Step
from ..engine.engine_host import EngineHost
from ..engine.frozen import blocks_of
from ..engine.stage import PackStage
from .model import StageModule


class PipelineStage(PackStage):
    """The passes of DeepSpeed's engine around a `model.StageModule`, at one ``part`` of its stages."""

    def __init__(self, host: EngineHost, step: Step, part: int = 0, **sums: Any) -> None:
        stage = host.engine.module.stages[part]
        super().__init__(host, stage.blocks, step, **sums)
        self._part, self._last = part, bool(stage.ends)

    def prepared(self, program: Program, wgrads: WgradStore) -> AbstractContextManager[None]:
        """Holds around the executor's `run`: linear layers can leave weight gradients, where the program wants that."""
        self._engine._reserve_pipe_buffers(1)
        if not any(action.defers_wgrad for action in program):
            return nullcontext()
        modules = (module for block in self.blocks for module in block.modules())
        return deferring([m for m in modules if isinstance(m, nn.Linear)], wgrads)

    def forward(self, loaded: Any, received: Tensor | None, action: Action) -> Tensor:
        pack: Pack = loaded.pack
        if action.kind == "forward_kv":
            return self._through(received, pack, head=False)
        layers = len(self.blocks) * self._recomputes if action.recomputed is None else action.recomputed
        output = self._through(received, pack, recomputed=layers)
        if not self._last:
            return output
        if action.kind == "score":
            return self._scored(output[0], pack)
        return self._weighed(output[0], pack)

    def _through(self, received: Tensor | None, pack: Pack, **how: Any) -> Tensor:
        output: Tensor = DeepSpeedEngine.forward(self._engine, received, pack, part=self._part, **how)
        return output

    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        engine = self._engine
        if gradient is None:
            engine.loss = graph.output
        else:
            engine.grad_layer, engine.pipe_buffers["outputs"][0] = gradient, graph.output
        with with_attributes(engine, stage_id=engine.num_stages - 1 if self._last else 0):  # asked if it is the last
            engine._exec_backward_pass(0)
        engine.loss = engine.grad_layer = None
        return None if graph.received is None else graph.received.grad

    def empty_like_input(self, pack: Pack) -> Tensor:
        """Space for hidden states [1, T, C]."""
        hidden, dtype = self._engine.module.config.hidden_size, next(self._engine.module.parameters()).dtype
        return torch.empty(1, pack.num_padded_tokens, hidden, dtype=dtype, device=self.device)

    def weight_grads(self) -> AbstractContextManager[None]:
        """As in the engine's own backwards: DeepSpeed's hooks take it for part of one, not for the end of one."""
        return with_attributes(self._engine, _running_engine_backward=True)

    def reduce(self) -> None:
        """One sum over the ranks of the stage; one that had no work takes part with zeros."""
        self._engine._exec_reduce_tied_grads()
        for parameter in self._engine.module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self._engine._exec_reduce_grads()


class FrozenPipelineStage(PipelineStage):
    """The passes of a frozen stage; the collector takes their losses down."""

    def __init__(self, host: EngineHost, step: Step, part: int, collector: LossCollector) -> None:
        super().__init__(host, step, part, weight=1.0, collector=collector)

    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        torch.autograd.backward(graph.output, gradient)
        return None if graph.received is None else graph.received.grad

    def _through(self, received: Tensor | None, pack: Pack, **how: Any) -> Tensor:
        output: Tensor = self._engine.module(received, pack, part=self._part, **how)
        return output


def stage_blocks(module: StageModule) -> list[AdaptedBlock]:
    """The decoder layers of a stage as adapters see them, under their names in the whole model."""
    own = {id(parameter): name for name, parameter in module.global_parameters().items()}
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    names = {id(layer): own[id(layer.weight)].removesuffix(".weight") for layer in linears}
    return blocks_of(module.blocks, names)
