"""`Host` on Megatron-Core: its model, DDP, optimizer, schedules and checkpoints, driven by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from ...core.machine.layout import Layout
from ...core.plan.program import lower
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from ...core.recipe.recipe import Recipe
from ...runtime.attention.kernels import choose_kernel
from ...runtime.attention.pack import build_pack
from ...runtime.attention.prefix import PrefixStore
from ...runtime.measure.busy import Busy, BusyClock, counts_waiting
from ...runtime.stage.executor import Executor
from ...runtime.stage.stage_links import StageLinks, rows_of_all
from ...runtime.world.plane import Plane
from ...runtime.world.world import World
from ..foreign_plans import refuse_foreign
from ..host import UPDATE, Inspect, Mark, StepResult, TokensOf, no_mark
from ..textbook import AdamState
from .batch import Batch, PlannedBatches
from .forward import Forward
from .model.attention import seq_params
from .model.gpt import DTYPES, build_model, build_optimizer, set_lr, transformer_config, wrap_model
from .model.weights import global_gradients, global_parameters, initialise
from .plane import open_plane
from .reduction import Reduction, gather_shards, gradient_norm
from .saving import checkpoint
from .saving.states import optimizer_states
from .setup import check_host, check_recipe, join_groups, leave_groups
from .stage import MegatronStage
from .stock import run_stock


class MegatronHost:
    """Trains a recipe's model on this process's part of the world; implements `integrations.host.Host`.

    Raises EvenloadError, before anything is built, for what Megatron-Core or this integration cannot honour.
    """

    def __init__(self, recipe: Recipe, world: World) -> None:
        check_recipe(recipe)
        self._version = check_host()
        self.recipe = recipe
        self.layout: Layout = recipe.layout(world.size)
        self.device = world.device
        self._links: StageLinks | None = None
        self._plane: Plane | None = None
        self._made_groups = join_groups(self.layout, recipe.train.seed)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        recipe, device = self.recipe, self.device
        self.dp_cp_rank: int = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.tp_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self.pipeline_stage: int = parallel_state.get_pipeline_model_parallel_rank()
        shares = any(plugin.shares for plugin in recipe.enabled())
        self.busy_waits: bool = (self.layout.tp > 1 or shares) and counts_waiting(device)
        self._last = parallel_state.is_pipeline_last_stage()

        config = transformer_config(recipe, self.layout)
        first = parallel_state.is_pipeline_first_stage()
        self.model: Any = build_model(recipe, config, first=first, last=self._last).to(device)
        initialise(
            self.model,
            recipe.train.seed,
            num_layers=config.num_layers,
            tp_rank=self.tp_rank,
            tp_size=self.layout.tp,
            std=config.init_method_std,
        )
        self.ddp: Any = wrap_model(recipe, config, self.model)
        self.optimizer: Any = build_optimizer(recipe, self.ddp)

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
        """Forward, backward, reduction, clipping and update of one planned step. Collective; see `Host.train_step`."""
        clock = BusyClock(self.device, record=record)
        reduction, busy, executed = self._run(plan, tokens_of, mark, clock)
        if inspect is not None:
            inspect(self._whole_gradients())
        mark(UPDATE)
        set_lr(self.optimizer, lr)
        with clock.noting("U"):
            norm = self._clip_in_float64() if self.recipe.train.dtype == "fp64" else None
            _, megatron_norm, _ = self.optimizer.step()
        norm = float(megatron_norm) if norm is None else norm
        spans = clock.spans(self.pipeline_stage, self.dp_cp_rank)
        return replace(_result(reduction, norm, busy, executed), spans=spans)

    def gradients(self, plan: StepPlan, tokens_of: TokensOf) -> tuple[StepResult, Mapping[str, Tensor]]:
        """Run the plan without an update; gradients by global parameter name, on the CPU. Collective.

        Tensor-parallel shards as this rank holds them, the layers of this pipeline stage only.
        """
        reduction, busy, executed = self._run(plan, tokens_of, no_mark, BusyClock(self.device))
        gradients = self._whole_gradients()
        norm = gradient_norm(self.model, parallel_state.get_model_parallel_group(), self.tp_rank)
        return _result(reduction, norm, busy, executed), gradients

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of all pipeline stages by global name, on the CPU. Collective."""
        return self.of_all_stages({name: p.detach().cpu().clone() for name, p in global_parameters(self.model)})

    def of_all_stages(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """With those of the other pipeline stages, of equal tensor-parallel index. Collective."""
        stages: list[Mapping[str, Tensor]] = [{} for _ in range(self.layout.pp)]
        torch.distributed.all_gather_object(stages, tensors, group=parallel_state.get_pipeline_model_parallel_group())
        return {name: tensor for stage in stages for name, tensor in stage.items()}

    def optimizer_states(self) -> Mapping[str, AdamState]:
        """Weights in the optimizer's precision and Adam's moments, of this stage's layers, on the CPU. Collective."""
        return optimizer_states(self.model, self.optimizer)

    def save(self, directory: Path) -> None:
        """Write model, optimizer and random states into an existing empty directory. Collective."""
        checkpoint.save(self, directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, on any number of ranks and any TP x PP. Collective."""
        checkpoint.load(self, directory)

    def describe(self) -> dict[str, Any]:
        """Versions, layout, attention kernel and parameters of this rank."""
        dtype = DTYPES[self.recipe.train.dtype]
        return {
            "trainer": "megatron",
            "megatron_core": self._version,
            "torch": torch.__version__,
            "device": str(self.device),
            "dtype": self.recipe.train.dtype,
            "attention": choose_kernel(self.device, dtype, self.model.config.kv_channels).name,
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "dp": self.layout.dp,
            "distributed_optimizer": self.ddp.ddp_config.use_distributed_optimizer,
            "overlap_grad_reduce": self.ddp.ddp_config.overlap_grad_reduce,
            "parameters_on_rank": sum(p.numel() for p in self.model.parameters()),
        }

    def close(self) -> None:
        """Drop the model and Megatron's process groups if they were made here; the world stays."""
        self.ddp = self.model = self.optimizer = None
        if self._links is not None:
            self._links.close()
            self._links = None
        if self._plane is not None:
            self._plane.close()
            self._plane = None
        if self._made_groups:
            leave_groups()
            self._made_groups = False

    def _run(
        self, plan: StepPlan, tokens_of: TokensOf, mark: Mark, clock: BusyClock
    ) -> tuple[Reduction, Busy, tuple[Slice, ...]]:
        """All forwards and backwards of this rank and the gradient sum: (its totals, seconds, slices run)."""
        refuse_foreign(plan, self.layout.dp_cp_size, self.layout.pp, host_schedule=plan.in_host_schedule)
        reduction = Reduction(self.ddp, plan, clock)
        forward = Forward(reduction, books=self._last and self.tp_rank == 0)
        mark("forward and backward")
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        if plan.in_host_schedule:
            batches = PlannedBatches.of_rank(plan, self.dp_cp_rank, tokens_of, self.device)
            executed = run_stock(self.ddp, batches, forward, reduction, mark, clock)
        else:
            executed = self._run_program(plan, tokens_of, forward, reduction, mark, clock)
        return reduction, clock.read(), tuple(executed)

    def _run_program(
        self, plan: StepPlan, tokens_of: TokensOf, forward: Forward, reduction: Reduction, mark: Mark, clock: BusyClock
    ) -> list[Slice]:
        """The order, cuts, replays, recomputation, sharing and offload of the plan."""
        if self._links is None and self.layout.pp > 1:
            pipeline = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
            self._links = StageLinks(rows_of_all(pipeline))  # by all ranks: they run one plan
        if plan.shared:
            self._plane = self._plane or open_plane()
            self._plane.node_ranks = plan.limits.node_ranks
        plane = self._plane if plan.shared else None

        def load(micro_batch: MicroBatch, prefix: PrefixStore | None) -> Batch:
            pack = build_pack(micro_batch, tokens_of, self.device, prefix, plane=plane)
            return Batch(pack, seq_params(pack))

        program = lower(plan, self.pipeline_stage, self.dp_cp_rank)
        trainer = MegatronStage(self.ddp, self.model, load=load, step=forward, last=self._last)
        place = plan, self.pipeline_stage, self.dp_cp_rank
        executor = Executor(*place, program, trainer, links=self._links, plane=plane, clock=clock, mark=mark)
        with reduction.computing(), trainer.prepared(program, executor.wgrads):
            executor.run()
        mark("gradient sum")
        reduction.finalize([self.ddp])
        return executor.executed

    def _whole_gradients(self) -> dict[str, Tensor]:
        """The summed gradients of this stage by global name, on the CPU; the optimizer's shards stay as they are."""
        gather_shards(self.ddp)
        return {name: gradient.cpu().clone() for name, gradient in global_gradients(self.model)}

    def _clip_in_float64(self) -> float:
        """Megatron's rule of clipping, which it has for float32 only; the norm before clipping."""
        norm = gradient_norm(self.model, parallel_state.get_model_parallel_group(), self.tp_rank)
        limit = self.recipe.train.clip_grad
        if limit > 0 and (factor := limit / (norm + 1e-6)) < 1.0:
            self.ddp.scale_gradients(factor)
        return norm


def _result(reduction: Reduction, norm: float, busy: Busy, executed: tuple[Slice, ...]) -> StepResult:
    loss_sum, num_targets = reduction.totals
    return StepResult(
        loss=loss_sum / max(1, num_targets),
        grad_norm=norm,
        num_targets=num_targets,
        busy_s=busy.total_s,
        forward_s=busy.forward_s,
        executed=executed,
        branches=(reduction.branch,),
    )
