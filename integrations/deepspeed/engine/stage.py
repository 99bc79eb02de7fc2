"""DeepSpeed's engine without pipeline stages for the executor: packs of a Hugging Face model, losses, backwards."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from ....core.plan.action import Action
from ....core.plan.step_plan import MicroBatch
from ....runtime.attention.labels import readers_of
from ....runtime.attention.pack import Pack, build_pack
from ....runtime.attention.prefix import PrefixStore
from ....runtime.attributes import with_attributes
from ....runtime.stage.executor import Graph, LoadedPack, StageTrainer
from ....runtime.stage.offload import layers_of
from ...host.scoring import Collector, token_losses
from ...host.step import Step
from ...huggingface import attention
from ...huggingface.routes import Recorder
from .engine import Releases
from .engine_host import EngineHost
from .expert_gate import GatedExperts
from .model import enable_recomputing, recomputing


class PackStage(StageTrainer):
    """What the engines of DeepSpeed have in common in one step: packs, and the sum of their losses.

    Args:
        weight: of the loss of every token, on top of its own.
        collector: takes down what scores give, and the losses of a frozen model.
    """

    def __init__(
        self,
        host: EngineHost,
        blocks: Sequence[Any],
        step: Step,
        *,
        weight: float = 0.0,
        collector: Collector | None = None,
    ) -> None:
        super().__init__(blocks, host.engine.device)
        self._engine = host.engine
        self._step = step
        self._plane = host.plane_of(step.plan)
        self._weight = weight
        self._recomputes = host.recipe.train.recompute
        """Every layer; a plan that says so itself overrules it."""
        self._collector = collector
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        """Sum of the token losses that this rank has computed, and their number."""

    def load(self, micro_batch: MicroBatch, prefix: PrefixStore | None) -> LoadedPack:
        tokens_of, readers = self._step.tokens_of, readers_of(self._step.labels)
        readers |= {"trunks": len(self._step.plan.trunks) > 0, "sparse": self._step.sparse}
        return LoadedPack(build_pack(micro_batch, tokens_of, self.device, prefix, plane=self._plane, **readers))

    def _weighed(self, logits_TV: Tensor, pack: Pack) -> Tensor:
        """The sum of the token losses of a pack as its backward starts from it; the collector takes them down by
        sequence, where there is one."""
        if self._collector is None and pack.weights_T is None:
            loss = token_losses(logits_TV, pack, reduction="sum")
        else:
            losses_T = token_losses(logits_TV, pack)
            if self._collector is not None:
                self._collector.add(losses_T.detach(), pack)
            loss = losses_T.sum() if pack.weights_T is None else (losses_T * pack.weights_T).sum()
        self.totals[0] += loss.detach()
        self.totals[1] += pack.num_targets
        return loss * self._weight

    def _scored(self, logits_TV: Tensor, pack: Pack) -> Tensor:
        """What is left of the logits of a pack once they are taken down: nothing."""
        assert self._collector is not None
        self._collector.add(logits_TV if self._collector.wants_logits else token_losses(logits_TV, pack), pack)
        return logits_TV.new_zeros(())


class EngineStage(PackStage):
    """The passes of an engine without pipeline stages; ``reduction`` is that of the step (`engine.one_reduction`; None:
    no backward comes), and ``recorder`` and ``gated`` experts are told which pack runs forward, if there are any."""

    def __init__(
        self,
        host: EngineHost,
        step: Step,
        reduction: Releases | None,
        recorder: Recorder | None,
        gated: GatedExperts | None,
        **sums: Any,
    ) -> None:
        super().__init__(host, layers_of(host.engine.module), step, **sums)
        self._reduction, self._gated = reduction, gated
        self._watchers = [watcher for watcher in (recorder, gated) if watcher]
        parameters = inspect.signature(host.engine.module.forward).parameters
        self._one_logit = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def entering(self, where: str) -> None:
        if self._gated:
            self._gated.gate.enter(where)

    def forward(self, loaded: Any, received: Tensor | None, action: Action) -> Tensor:
        with ExitStack() as forward:
            for watcher in self._watchers:
                forward.enter_context(with_attributes(watcher, pack=loaded.pack))
            return self._forward(loaded, action)

    def _forward(self, loaded: LoadedPack, action: Action) -> Tensor:
        if action.kind == "forward_kv":
            output: Tensor = self._engine(**call_of(loaded.pack), **self._one_logit).logits
            return output
        if action.kind == "score":
            return self._scored(self._engine(**call_of(loaded.pack)).logits[0], loaded.pack)
        assert self._reduction is not None
        # What a plan says of a micro-batch overrules the recipe; 0 where neither recomputes needs nothing.
        says = action.recomputed is not None and (action.recomputed > 0 or self._recomputes)
        if says:
            enable_recomputing(self._engine.module, self.blocks)
        with recomputing(self.blocks, action.recomputed or 0) if says else nullcontext():
            logits_TV = self._logits_of(loaded.pack)
        self._reduction.after_forward()
        return self._weighed(logits_TV, loaded.pack)

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        assert self._reduction is not None
        self._reduction.before_backward()
        self._engine.backward(graph.output, scale_wrt_gas=False)

    def _logits_of(self, pack: Pack) -> Tensor:
        """[T, V], from a forward that will have a backward."""
        logits_TV: Tensor = self._engine(**call_of(pack)).logits[0]
        return logits_TV


def call_of(pack: Pack) -> dict[str, Any]:
    """The arguments of the model's call for a pack."""
    return {
        "input_ids": pack.tokens_T[None],
        "position_ids": pack.positions_T[None],
        "use_cache": False,
        attention.PACK: pack,
    }
