"""`Host` on DeepSpeed's pipelines: one planned step through a `PipelineEngine` with ZeRO 0 or 1.

    loss of a micro-batch = sum of its token losses / T,   T = target tokens of the global batch

computed at the last stage; gradients are summed over the ranks of a stage, once, at the end of the step. Ranks may run
different numbers of micro-batches, in whatever order the plan gives each stage. The ranks of a stage are neighbours:
world rank = stage * dp + plane rank.

Measured against a plain run of the same weights, 2 and 4 gloo ranks, float32: see docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils import groups

from ...core.errors import EvenloadError
from ...core.recipe import Recipe
from ...core.workload import StepPlan
from ...runtime.busy import BusyClock, counts_waiting
from ...runtime.kernels import choose_kernel
from ...runtime.pack import TokensOf, count_targets
from ...runtime.plane import Plane
from ...runtime.stage_links import StageLinks, rows_of_all
from ...runtime.world import World
from ..host import UPDATE, Mark, StepResult, no_mark
from . import checkpoint
from .engine import discard_gradients, full_gradients, full_weights, make_engine
from .host import norm_of, refuse_impossible
from .pipeline_model import StageModule, build_stage
from .pipeline_stage import PlannedStage
from .supported import refuse_unequal_replay


class PipelineHost:
    """Runs plans on DeepSpeed's pipelines. Making one is collective.

    Args:
        recipe: with ``parallel.pp`` above 1, and ``model.vocab_size`` resolved or ``model.config``.
        world: this process.

    Raises:
        EvenloadError: the recipe asks for what DeepSpeed cannot honour here.
    """

    def __init__(self, recipe: Recipe, world: World) -> None:
        refuse_impossible(recipe)
        self.layout = recipe.layout(world.size)
        self.world, self.recipe = world, recipe
        module = build_stage(recipe, self.layout, world.rank, world.device)
        self._grid_before = groups.mpu
        self.engine = make_engine(module, recipe, self.layout.dp)
        self.module: StageModule = self.engine.module
        self.stage = int(self.engine.zero_optimization_stage())
        self.pipeline_stage = int(self.engine.stage_id)
        grid = self.engine.grid
        self.plane_rank = int(grid.data_parallel_id)
        self._stages = grid.get_pipe_parallel_group()
        self._links = StageLinks(rows_of_all(grid.pp_group))
        self._rows = rows_of_all(grid.dp_group)
        self._plane: Plane | None = None
        shares = any(plugin.shares for plugin in recipe.enabled())
        self.busy_waits = shares and self.layout.dp > 1 and counts_waiting(world.device)

    def train_step(
        self, plan: StepPlan, tokens_of: TokensOf, *, lr: float, mark: Mark = no_mark, record: bool = False
    ) -> StepResult:
        """See `Host.train_step`."""
        clock = BusyClock(self.world.device, record=record)
        result = self._accumulate(plan, tokens_of, mark, clock)
        mark(UPDATE)
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = lr
        with clock.noting("U"):
            # Plain fp32 training is clipped by the engine itself, which then keeps no norm.
            norm = self._norm(p.grad for p in self.module.parameters()) if self.stage == 0 else None
            self.engine._exec_optimizer_step()
            if norm is None:
                norm = float(self.engine.get_global_grad_norm())
        return StepResult(grad_norm=norm, **result, spans=clock.spans(self.pipeline_stage, self.plane_rank))

    def gradients(self, plan: StepPlan, tokens_of: TokensOf) -> tuple[StepResult, Mapping[str, torch.Tensor]]:
        """See `Host.gradients`."""
        result = self._accumulate(plan, tokens_of, no_mark, BusyClock(self.world.device))
        gradients = full_gradients(self.engine, self.module.global_parameters())
        discard_gradients(self.engine)
        return StepResult(grad_norm=self._norm(gradients.values()), **result), gradients

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that the forward uses, of all stages, by name, float32 on the CPU. Collective."""
        own = full_weights(self.engine, self.module.global_parameters())
        stages: list[dict[str, torch.Tensor]] = [{} for _ in range(self.layout.pp)]
        dist.all_gather_object(stages, own, group=self._stages)
        return {name: weight for stage in stages for name, weight in stage.items()}

    def save(self, directory: Path) -> None:
        """See `Host.save`."""
        checkpoint.save(self.engine, directory)

    def load(self, directory: Path) -> None:
        """See `Host.load`. Raises EvenloadError where there is nothing to load."""
        checkpoint.load(self.engine, directory)

    def describe(self) -> dict[str, Any]:
        """See `Host.describe`."""
        config = self.module.config
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
            "parameters_on_rank": sum(p.numel() for p in self.module.parameters()),
            "attention": choose_kernel(self.world.device, dtype, head_dim).name,
            "device": str(self.world.device),
        }

    def close(self) -> None:
        """See `Host.close`."""
        self._links.close()
        if self._plane is not None:
            self._plane.close()
            self._plane = None
        self.engine.destroy()
        # DeepSpeed would lay out the next engine of this process as this one.
        groups.mpu = self._grid_before

    def _accumulate(self, plan: StepPlan, tokens_of: TokensOf, mark: Mark, clock: BusyClock) -> dict[str, Any]:
        """Forward and backward of this rank's micro-batches, gradients reduced; `StepResult` but for norm and spans."""
        self._refuse(plan)
        num_targets = count_targets(plan.sequences)
        if num_targets == 0:
            raise EvenloadError(
                "the batch has no target token", f"{len(plan.sequences)} sequences", "use longer samples"
            )
        if plan.replayed or plan.recompute:
            refuse_unequal_replay(self.module)
        stage = PlannedStage(
            self.engine,
            plan,
            self.plane_rank,
            links=self._links,
            plane=self._plane_of(plan),
            tokens_of=tokens_of,
            weight=1 / num_targets,
            recomputes=self.recipe.train.recompute,
            clock=clock,
            mark=mark,
        )
        stage.run()
        dist.all_reduce(stage.loss_sum)
        busy = clock.read()
        return {
            "loss": float(stage.loss_sum),
            "num_targets": num_targets,
            "busy_s": busy.total_s,
            "forward_s": busy.forward_s,
            "executed": tuple(stage.executed),
        }

    def _norm(self, gradients: Any) -> float:
        """Of the gradients of all stages. Collective."""
        square = torch.tensor(norm_of(gradients) ** 2, dtype=torch.float64, device=self.world.device)
        dist.all_reduce(square, group=self._stages)
        return float(square.sqrt())

    def _plane_of(self, plan: StepPlan) -> Plane | None:
        """What the ranks of a stage share micro-batches over; made, by all ranks, for the first plan that needs it."""
        if plan.shared and self._plane is None:
            self._plane = Plane.make(self._rows, node_ranks=plan.limits.node_ranks)
        return self._plane

    def _refuse(self, plan: StepPlan) -> None:
        limits, stages = plan.limits, len(plan.order or plan.recompute) or plan.limits.num_stages
        found = ""
        if (limits.num_ranks, stages) != (self.layout.dp, self.layout.pp):
            found = f"a plan for {limits.num_ranks} ranks in {stages} stages, {self.layout.dp} in {self.layout.pp} here"
        elif any(len(m.ranks) > 1 and not m.engine for m in (*plan.micro_batches, *plan.backward)):
            found = "a micro-batch on several ranks that names no engine (static context parallelism)"
        if found:
            do = "plan for the layout of this job, and share sequences by plugins.mesh"
            raise EvenloadError("trainer deepspeed cannot run this plan", found, do)
