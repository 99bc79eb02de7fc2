"""`Host` on DeepSpeed's pipelines: one planned step through a `PipelineEngine` with ZeRO 0 or 1.

    loss of a micro-batch = sum of its token losses / T,   T = target tokens of the global batch

computed at the last stage; gradients are summed over the ranks of a stage, once, at the end of the step. Ranks may run
different numbers of micro-batches, in whatever order the plan gives each stage. The ranks of a stage are neighbours:
world rank = stage * dp + plane rank.

Measured against a plain run of the same weights, 2 and 4 gloo ranks, float32: see docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor

from ....core.plan.action import Program
from ....core.plan.forwards import lower_forwards
from ....core.plan.program import lower
from ....core.plan.step_plan import StepPlan
from ....core.recipe.recipe import Recipe
from ....runtime.adapters.peers import AdapterPeers
from ....runtime.adapters.places import linears_in
from ....runtime.attention.pack import Pack
from ....runtime.generate.engine import Decoder
from ....runtime.generate.quantized import linears_of
from ....runtime.measure.busy import counts_waiting
from ....runtime.stage.stage_links import StageLinks, v_links
from ....runtime.world.agreement import everyone, rows_of_all
from ....runtime.world.plane import Plane
from ....runtime.world.world import World
from ...host.generating import staged
from ...host.gradients import FrozenModel
from ...host.scoring import Collector, LossCollector, evaluating
from ...host.step import Step, refuse_foreign
from ...host.trained import PassResult, Trainable, freeze
from ...huggingface.models import refuse_unequal_replay
from ..engine.engine import make_engine
from ..engine.engine_host import EngineHost, EngineWeights
from ..engine.frozen import frozen
from .model import StageModule, build_stage
from .stage import FrozenPipelineStage, PipelineStage, stage_blocks


class PipelineHost(EngineHost):
    """Runs plans on DeepSpeed's pipelines, which ``train`` makes of the stage; ``parallel.pp`` is above 1."""

    def __init__(self, recipe: Recipe, world: World, train: Callable[[PipelineHost, StageModule], Trainable]) -> None:
        super().__init__(recipe, world)
        module = build_stage(recipe, self.layout, world.rank, world.device)
        self._grid_before = groups.mpu
        self.trained = train(self, module)
        self.module: StageModule = self.engine.module
        self.stage = int(self.engine.zero_optimization_stage())
        self.pipeline_stage = int(self.engine.stage_id)
        self.collects = bool(self.module.stages[-1].ends)
        grid = self.engine.grid
        self.dp_cp_rank = int(grid.data_parallel_id)
        self._stages = grid.get_pipe_parallel_group()
        rows = rows_of_all(grid.pp_group)
        self._links = v_links(rows) if self.layout.v_shape else (StageLinks(rows),)
        self._rows = rows_of_all(grid.dp_group)
        shares = bool(recipe.deciding("shares"))
        self.busy_waits = shares and self.layout.dp > 1 and counts_waiting(world.device)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "parameters": self.module.num_weights}

    def close(self) -> None:
        super().close()
        # DeepSpeed would lay out the next engine of this process as this one.
        groups.mpu = self._grid_before

    def own_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return self.module.global_parameters()

    def gathered(self, wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        own, tensors = self.own_parameters(), {}
        for name, like in wanted.items():
            source = self._stage_of[name] * self.layout.dp
            if source == self.world.rank:
                tensors[name] = own[name].detach()
            if source and self.world.rank == source:
                dist.send(tensors[name].contiguous(), 0)
            elif source and self.world.rank == 0:
                dtype = next(iter(own.values())).dtype
                tensors[name] = torch.empty(like.shape, dtype=dtype, device=self.world.device)
                dist.recv(tensors[name], source)
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    @cached_property
    def _stage_of(self) -> Mapping[str, int]:
        """The stage of each parameter of the model. Collective where it is first asked for."""
        parts = everyone(list(self.own_parameters()), self._stages)
        return {name: stage for stage, names in enumerate(parts) for name in names}

    def programs_of(self, plan: StepPlan, *, forwards: bool = False) -> Iterator[tuple[int, Program]]:
        """(Number of a stage on this rank, what it runs there). Raises EvenloadError for a plan that cannot run."""
        refuse_foreign(plan, self.layout.dp, self.layout.num_stages, v_shape=self.layout.v_shape)
        if not forwards:
            refuse_unequal_replay(plan, self.module)
        lowered = lower_forwards if forwards else lower
        return enumerate(lowered(plan, stage, self.dp_cp_rank) for stage in self.stages)

    @property
    def output_layer(self) -> torch.nn.Module | None:
        return self.module.stages[-1].ends[-1] if self.collects else None

    def _forwards(self, step: Step, collector: Collector) -> None:
        programs = self.programs_of(step.plan, forwards=True)
        with evaluating(self.module):
            self.execute(step, *((p, PipelineStage(self, step, part, collector=collector)) for part, p in programs))

    def adapter_peers(self) -> AdapterPeers:
        """The ranks that adapters are summed and gathered over."""
        return AdapterPeers(self.engine.grid.get_data_parallel_group(), self.engine.grid.get_pipe_parallel_group())

    def frozen_passes(self, step: Step, collector: LossCollector) -> PassResult:
        """All passes of this rank through stages whose weights are frozen."""
        programs = self.programs_of(step.plan)
        parts = [(program, FrozenPipelineStage(self, step, part, collector)) for part, program in programs]
        return PassResult(self.execute(step, *parts))

    @contextmanager
    def frozen_model(self) -> Iterator[FrozenModel]:
        blocks = stage_blocks(self.module)
        linears = [name for part in self.of_each_stage(linears_in(blocks)) for name in part]
        first: Any = self.module.forward_funcs[0] if self.engine.is_first_stage() else None
        with frozen(self.module, first):
            yield FrozenModel(blocks, linears, self.adapter_peers(), torch.float32, self.frozen_passes)

    @contextmanager
    def decoding(self) -> Iterator[Decoder]:
        weight = next(self.module.parameters())

        def run(received_1TC: Tensor | None, pack: Pack, slots_R: Tensor) -> Tensor:
            output: Tensor = self.module(received_1TC, pack, head=False)
            if self.collects:
                output = output[0, slots_R]
            for layer in self.module.stages[-1].ends:
                output = layer(output)
            return output

        def empty(pack: Pack) -> Tensor:
            return torch.empty(
                1, pack.num_padded_tokens, self.module.config.hidden_size, dtype=weight.dtype, device=self.device
            )

        with evaluating(self.module):
            yield staged(run, self.device, self._stages, empty, linears_of(self.module.blocks))

    def _open_plane(self) -> Plane:
        return Plane.make(self._rows)


class PipelineWeights(EngineWeights):
    """The weights of a stage. Making it puts the stage into the host's engine; collective."""

    _host: PipelineHost

    def __init__(self, host: PipelineHost, module: StageModule) -> None:
        super().__init__(host)
        own, patterns = module.global_parameters(), host.recipe.train.freeze
        self.frozen = freeze(patterns, own, list(dict.fromkeys(map(tuple, everyone(list(own))))))
        host.engine = make_engine(module, host.recipe, host.layout.dp)

    def _passes(self, step: Step, divisor: float) -> tuple[Tensor, PassResult]:
        host = self._host
        programs, sums = host.programs_of(step.plan), {"weight": 1 / divisor, "collector": step.collector}
        parts = [(program, PipelineStage(host, step, part, **sums)) for part, program in programs]
        executed, last = host.execute(step, *parts), parts[-1][1]
        step.mark("gradient reduction")
        with step.clock.noting("G"):
            last.reduce()
        return last.totals, PassResult(executed)

    def norm(self, gradients: Mapping[str, Tensor | None]) -> float:
        square = torch.tensor(super().norm(gradients) ** 2, dtype=torch.float64, device=self._host.device)
        dist.all_reduce(square, group=self._host.engine.grid.get_pipe_parallel_group())
        return float(square.sqrt())

    def _step(self) -> None:
        self._host.engine._exec_optimizer_step()
