"""Tenants on DeepSpeed: a frozen Hugging Face model in an engine without an optimizer, its linear layers adapted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.plan.branches import SUM_AFTER_PASSES
from ....core.plan.in_step import Program
from ....core.plan.step_plan import StepPlan
from ....runtime.adapters.adapters import Adapters
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.attention.labels import Labels
from ....runtime.attention.pack import TokensOf
from ....runtime.stage.executor import StageTrainer
from ....runtime.stage.offload import layers_of
from ...host.foreign_plans import refuse_foreign
from ...host.host import Host, StepResult
from ...host.scoring import LossBook
from ...host.step import Step
from ...host.tenants import TenantHost, targets_of_tenants
from ...huggingface.models import refuse_unequal_replay
from ..engine.engine_host import EngineHost, Passed
from ..engine.host import DeepSpeedHost
from ..engine.model import enable_recomputing
from .frozen import SHARDED, blocks_of, frozen_engine, linear_names, need_gradient, replay_first
from .stage import FrozenStage


class EngineTenants(TenantHost, EngineHost):
    """Trains the adapters of tenants beside a frozen model in one of DeepSpeed's engines."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "adapted_linears": len(self.adapters.linears)}

    def gradients(
        self, plan: StepPlan, tokens_of: TokensOf, labels: Labels | None = None
    ) -> tuple[StepResult, Mapping[str, Tensor]]:
        return Host.gradients(self, plan, tokens_of, labels)

    def _run(self, step: Step) -> StepResult:
        plan, clock = step.plan, step.clock
        targets = targets_of_tenants(plan, step.labels)
        if plan.replayed or plan.recompute:
            refuse_unequal_replay(self.engine.module)
        program, branches = self._program(plan)
        self.adapters.begin(plan.tenants)
        book = LossBook(len(plan.lengths), self.device)
        trainer = self._trainer(
            step=step, plane=self._plane_of(plan), recomputes=self.recipe.train.recompute, book=book
        )
        executed = self._execute(step, program, trainer)
        step.mark("gradient sum")
        with clock.noting("G"):
            scores = book.scores()
            tenants = self._of_tenants(plan, targets, scores)
        busy = clock.read()
        of_rank = busy.total_s, busy.forward_s, executed, (SUM_AFTER_PASSES, *branches)
        return StepResult(self._loss(), sum(targets.values()), *of_rank, tenants=tenants)

    def _passes(self, step: Step, num_targets: int) -> Passed:
        raise AssertionError("the passes of tenants are those of _run")

    @abstractmethod
    def _program(self, plan: StepPlan) -> tuple[Program, tuple[str, ...]]:
        """What this rank runs of a plan, and branches that the plan does not show."""

    @abstractmethod
    def _trainer(self, **of_step: Any) -> StageTrainer:
        """What runs the passes of a step."""


class DeepSpeedTenants(EngineTenants, DeepSpeedHost):
    """Without pipeline stages, under ZeRO 0, 1, 2 or 3. Ranks run different numbers of micro-batches but under 3."""

    def _open_engine(self, model: Any) -> None:
        names = linear_names(model)
        # Transformers' own hook for recomputation would have ZeRO 3 gather the embedding in every backward.
        model.disable_input_require_grads()
        self.frozen = frozenset(name for name, _ in model.named_parameters())
        self.engine = frozen_engine(model, self.recipe, self.world.size)
        module = self.engine.module
        blocks = blocks_of(layers := layers_of(module), names)
        own = [place.name for block in blocks for site in block.sites for place in site.places]
        peers = AdapterPeers(dist.group.WORLD if self.world.size > 1 else None)
        self.adapters = Adapters(blocks, own, peers, torch.float32, self.device)
        module.get_input_embeddings().register_forward_hook(need_gradient)
        if self.recipe.deepspeed.zero_stage == SHARDED:
            enable_recomputing(module, layers)
            replay_first(layers)

    def _program(self, plan: StepPlan) -> tuple[Program, tuple[str, ...]]:
        refuse_foreign(plan, self.world.size, 1, splits_backward=False)
        return self._program_of(plan, "none")

    def _trainer(self, **of_step: Any) -> StageTrainer:
        return FrozenStage(self.engine, **of_step)
