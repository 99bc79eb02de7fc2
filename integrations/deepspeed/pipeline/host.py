"""`Host` on DeepSpeed's pipelines: one planned step through a `PipelineEngine` with ZeRO 0 or 1.

    loss of a micro-batch = sum of its token losses / T,   T = target tokens of the global batch

computed at the last stage; gradients are summed over the ranks of a stage, once, at the end of the step. Ranks may run
different numbers of micro-batches, in whatever order the plan gives each stage. The ranks of a stage are neighbours:
world rank = stage * dp + plane rank.

Measured against a plain run of the same weights, 2 and 4 gloo ranks, float32: see docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor

from ....core.plan.branches import SUM_AFTER_PASSES
from ....core.plan.program import lower
from ....core.plan.step_plan import Slice, StepPlan
from ....core.recipe.recipe import Recipe
from ....runtime.attention.pack import TokensOf
from ....runtime.measure.busy import BusyClock, counts_waiting
from ....runtime.stage.executor import Executor
from ....runtime.stage.stage_links import StageLinks
from ....runtime.world.agreement import rows_of_all
from ....runtime.world.plane import Plane
from ....runtime.world.world import World
from ...foreign_plans import refuse_foreign
from ...host import Mark
from ..engine import make_engine
from ..engine_host import EngineHost
from .model import StageModule, build_stage
from .stage import PipelineStage


class PipelineHost(EngineHost):
    """Runs plans on DeepSpeed's pipelines; ``parallel.pp`` of its recipe is above 1."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(recipe, world)
        module = build_stage(recipe, self.layout, world.rank, world.device)
        self._grid_before = groups.mpu
        self.engine = make_engine(module, recipe, self.layout.dp)
        self.module: StageModule = self.engine.module
        self.stage = int(self.engine.zero_optimization_stage())
        self.pipeline_stage = int(self.engine.stage_id)
        grid = self.engine.grid
        self.dp_cp_rank = int(grid.data_parallel_id)
        self._stages = grid.get_pipe_parallel_group()
        self._links = StageLinks(rows_of_all(grid.pp_group))
        self._rows = rows_of_all(grid.dp_group)
        shares = any(plugin.shares for plugin in recipe.enabled())
        self.busy_waits = shares and self.layout.dp > 1 and counts_waiting(world.device)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "parameters": self.module.num_weights}

    def close(self) -> None:
        super().close()
        # DeepSpeed would lay out the next engine of this process as this one.
        groups.mpu = self._grid_before

    def _own_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return self.module.global_parameters()

    def _step(self) -> None:
        self.engine._exec_optimizer_step()

    def _passes(
        self, plan: StepPlan, tokens_of: TokensOf, num_targets: int, mark: Mark, clock: BusyClock
    ) -> tuple[Tensor, tuple[Slice, ...], tuple[str, ...]]:
        refuse_foreign(plan, self.layout.dp, self.layout.pp)
        place, plane = (plan, self.pipeline_stage, self.dp_cp_rank), self._plane_of(plan)
        recomputes = self.recipe.train.recompute
        trainer = PipelineStage(
            self.engine, plane=plane, tokens_of=tokens_of, weight=1 / num_targets, recomputes=recomputes
        )
        program = lower(*place)
        executor = Executor(*place, program, trainer, links=self._links, plane=plane, clock=clock, mark=mark)
        executor.run()
        mark("gradient reduction")
        with clock.noting("G"):
            trainer.reduce()
        return trainer.loss_sum, tuple(executor.executed), (SUM_AFTER_PASSES,)

    def _norm_of(self, gradients: Iterable[Tensor | None]) -> float:
        square = torch.tensor(super()._norm_of(gradients) ** 2, dtype=torch.float64, device=self.world.device)
        dist.all_reduce(square, group=self._stages)
        return float(square.sqrt())

    def _open_plane(self) -> Plane:
        return Plane.make(self._rows)
