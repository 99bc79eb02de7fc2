"""Passes of a frozen model without pipeline stages: gradients for adapters alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.attention.pack import Pack
from ....runtime.stage.executor import Graph
from ..engine.engine import Releases
from ..engine.stage import EngineStage, call_of


class FrozenStage(EngineStage):
    """The passes of a frozen model; the collector takes their losses down."""

    def __init__(self, engine: Any, **of_step: Any) -> None:
        self._releases = Releases(engine.module)
        super().__init__(engine, self._releases, None, None, weight=1.0, **of_step)
        self._offload = engine.optimizer

    def _loss_of(self, pack: Pack) -> Tensor:
        return self._sum(self._engine.module(**call_of(pack)).logits[0], pack)

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        self._releases.before_backward()
        torch.autograd.backward(graph.output)
        if self._offload is not None:
            self._offload.release_backward_leftovers()
