"""What a planned step is on any engine of DeepSpeed; how a rank runs its passes is a subclass's to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

from ...core.errors import EvenloadError
from ...core.machine.layout import Layout
from ...core.plan.step_plan import Slice, StepPlan
from ...core.recipe.recipe import Recipe
from ...runtime.attention.kernels import choose_kernel
from ...runtime.attention.pack import TokensOf, count_targets
from ...runtime.measure.busy import BusyClock
from ...runtime.world.plane import Plane
from ...runtime.world.world import World
from ..host import UPDATE, Inspect, Mark, StepResult, no_mark
from ..textbook import AdamState
from . import checkpoint
from .engine import adam_states, discard_gradients, full_gradients
from .unmodified.supported import refuse_unequal_replay


class EngineHost(ABC):
    """Implements `integrations.host.Host` but for the passes. Making one is collective.

    Args:
        recipe: with ``model.vocab_size`` resolved, or ``model.config``.
        world: this process.

    Raises:
        EvenloadError: the recipe asks for what DeepSpeed cannot honour here.
    """

    engine: Any
    stage: int
    """Of ZeRO."""
    dp_cp_rank: int
    pipeline_stage: int
    device: torch.device
    busy_waits: bool

    def __init__(self, recipe: Recipe, world: World) -> None:
        _refuse_impossible(recipe)
        self.layout: Layout = recipe.layout(world.size)
        self.world, self.recipe, self.device = world, recipe, world.device
        self._plane: Plane | None = None

    def train_step(
        self,
        plan: StepPlan,
        tokens_of: TokensOf,
        *,
        lr: float,
        mark: Mark = no_mark,
        record: bool = False,
        inspect: Inspect | None = None,
    ) -> StepResult:
        """See `Host.train_step`."""
        clock = BusyClock(self.device, record=record)
        result = self._accumulate(plan, tokens_of, mark, clock)
        if inspect is not None:
            inspect(self._gradients())
        mark(UPDATE)
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = lr
        with clock.noting("U"):
            # Plain fp32 training is clipped by the engine itself, which then keeps no norm.
            norm = self._norm(p.grad for p in self.engine.module.parameters()) if self.stage == 0 else None
            self._update()
            if norm is None:
                norm = float(self.engine.get_global_grad_norm())
        return StepResult(grad_norm=norm, **result, spans=clock.spans(self.pipeline_stage, self.dp_cp_rank))

    def gradients(self, plan: StepPlan, tokens_of: TokensOf) -> tuple[StepResult, Mapping[str, torch.Tensor]]:
        """See `Host.gradients`."""
        result = self._accumulate(plan, tokens_of, no_mark, BusyClock(self.device))
        gradients = self._gradients()
        discard_gradients(self.engine)
        return StepResult(grad_norm=self._norm(gradients.values()), **result), gradients

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """See `Host.weights`."""

    @abstractmethod
    def of_all_stages(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Host.of_all_stages`."""

    def optimizer_states(self) -> dict[str, AdamState]:
        """See `Host.optimizer_states`."""
        states = adam_states(self.engine, self._own_parameters())
        return {name: AdamState(*state) for name, state in states.items()}

    def save(self, directory: Path) -> None:
        """See `Host.save`."""
        checkpoint.save(self.engine, directory)

    def load(self, directory: Path) -> None:
        """See `Host.load`. Raises EvenloadError where there is nothing to load."""
        checkpoint.load(self.engine, directory, trust=self.recipe.checkpoint.trust)

    def describe(self) -> dict[str, Any]:
        """See `Host.describe`."""
        config = self.engine.module.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = torch.bfloat16 if self.recipe.train.dtype == "bf16" else torch.float32
        return {
            "trainer": "deepspeed",
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "zero_stage": self.stage,
            "pp": self.layout.pp,
            "dp": self.layout.dp,
            "dtype": self.recipe.train.dtype,
            "recompute": self.recipe.train.recompute,
            "model": config.model_type,
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters()),
            "attention": choose_kernel(self.world.device, dtype, head_dim).name,
            "device": str(self.world.device),
        }

    def close(self) -> None:
        """See `Host.close`."""
        if self._plane is not None:
            self._plane.close()
            self._plane = None
        self.engine.destroy()

    def _accumulate(self, plan: StepPlan, tokens_of: TokensOf, mark: Mark, clock: BusyClock) -> dict[str, Any]:
        """Forward and backward of this rank's micro-batches, gradients reduced; `StepResult` but for norm and spans."""
        num_targets = count_targets(plan.lengths)
        if num_targets == 0:
            raise EvenloadError("the batch has no target token", f"{len(plan.lengths)} sequences", "use longer samples")
        if plan.replayed or plan.recompute:
            refuse_unequal_replay(self.engine.module)
        total, executed, branches = self._run(plan, tokens_of, num_targets, mark, clock)
        dist.all_reduce(total)
        busy = clock.read()
        return {
            "loss": float(total) / num_targets,
            "num_targets": num_targets,
            "busy_s": busy.total_s,
            "forward_s": busy.forward_s,
            "executed": executed,
            "branches": branches,
        }

    @abstractmethod
    def _run(
        self, plan: StepPlan, tokens_of: TokensOf, num_targets: int, mark: Mark, clock: BusyClock
    ) -> tuple[torch.Tensor, tuple[Slice, ...], tuple[str, ...]]:
        """All passes of this rank: (sum of its token losses, a float64 number on the device; slices it ran; branches
        that the plan does not show, in the words of `core.plan.branches`)."""

    @abstractmethod
    def _own_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters of this rank's part of the model, under their global names."""

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The summed gradients of this rank's part of the model, by name, on the CPU. Collective."""
        return full_gradients(self.engine, self._own_parameters())

    @abstractmethod
    def _update(self) -> None:
        """Clip and apply the gradients."""

    def _norm(self, gradients: Any) -> float:
        """Of the gradients of the whole model; None among them count as zeros. Collective."""
        norms = [t.detach().double().norm() for t in gradients if t is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0


def _refuse_impossible(recipe: Recipe) -> None:
    """Raise EvenloadError for what no engine of DeepSpeed does here."""
    degrees = {name: getattr(recipe.parallel, name) for name in ("tp", "cp", "ep")}
    wanted = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if wanted:
        raise EvenloadError(
            "trainer deepspeed divides a model over pipeline stages alone",
            ", ".join(wanted),
            "set these parallel.* to 1, or use trainer: megatron",
        )
    if recipe.train.dtype == "fp64":
        raise EvenloadError("DeepSpeed's engine cannot train in float64", "train.dtype fp64", "use fp32")
