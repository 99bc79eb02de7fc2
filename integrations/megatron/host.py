"""`Host` on Megatron-Core: its model and process groups, and what runs a program of a plan through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ...core.machine.layout import Layout
from ...core.machine.replicas import place_in
from ...core.plan.action import Program
from ...core.plan.branches import COPIED
from ...core.plan.forwards import lower_forwards
from ...core.plan.program import lower
from ...core.plan.step_plan import MicroBatch, Slice, StepPlan
from ...core.recipe.recipe import Recipe
from ...core.registry import layer_planner
from ...runtime.adapters.places import linears_in
from ...runtime.attention.kernels import choose_kernel
from ...runtime.attention.labels import checked_divisor, readers_of
from ...runtime.attention.pack import build_pack
from ...runtime.attention.prefix import PrefixStore
from ...runtime.experts.gate import ExpertGate
from ...runtime.experts.routing import StepRouting
from ...runtime.generate.engine import Decoder
from ...runtime.measure.busy import counts_waiting
from ...runtime.world.agreement import Group, everyone
from ...runtime.world.plane import Plane
from ...runtime.world.replicas import JobGroup, commit, is_replica
from ...runtime.world.world import World
from ..host.gradients import FrozenModel
from ..host.host import Host
from ..host.scoring import Collector, LossCollector, evaluating
from ..host.step import Step, refuse_foreign
from ..host.trained import PassResult, Snapshots, StepResult, Trainable, freeze, without_gradients
from ..reference.textbook import AdamState
from .adapted import adapter_peers, blocks_of
from .base.plane import join_groups, leave_groups, links_of_device, open_plane
from .base.setup import check_host, check_recipe
from .batch import Batch, ForwardStep, PlannedBatches, collecting, run_batch, run_for_logits, run_stock
from .decoding import decoder_of
from .exchange import Exchange
from .model.attention import seq_params
from .model.expert_gate import bind_gate
from .model.experts import forget_tokens, routers
from .model.gpt import DTYPES, adam_states, build_optimizer, build_stages, transformer_config, wrap_model
from .model.sharded_experts import shard_experts
from .model.v_shape import stages_of
from .model.weights import global_gradients, global_parameters, global_tensors, initialise
from .pretrained.transfer import Exported, exported, read_pretrained
from .reduction import Reduction, gather_shards, gradient_norm, move_biases
from .saving import checkpoint
from .saving.optimizer import ROWS, optimizer_states, rows_of, write_row
from .stage import MegatronStage, reaching_recomputed

T = TypeVar("T")


class MegatronHost(Host):
    """Trains a recipe's model on this process's part of the world; ``train`` opens what is trained of it.

    Raises EvenloadError, before anything is built, for what Megatron-Core or this integration cannot honour.
    """

    ddp: Any
    """The model as passes call it: in Megatron's DDP where its weights are trained."""
    optimizer: Any = None
    gate: ExpertGate | None = None
    """Of the layers with experts whose weights are trained."""

    def __init__(
        self, recipe: Recipe, world: World, train: Callable[[MegatronHost, TransformerConfig], Trainable]
    ) -> None:
        check_recipe(recipe)
        self._version = check_host()
        self.recipe = recipe
        self.layout: Layout = recipe.layout(world.size)
        self.device = world.device
        self._made_groups = join_groups(self.layout, recipe.train.seed)
        try:
            self._build(train)
        except BaseException:
            self.close()
            raise

    def _build(self, train: Callable[[MegatronHost, TransformerConfig], Trainable]) -> None:
        recipe, device = self.recipe, self.device
        self.dp_cp_rank: int = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.tp_rank: int = parallel_state.get_tensor_model_parallel_rank()
        self.pipeline_stage: int = parallel_state.get_pipeline_model_parallel_rank()
        shares = bool(recipe.deciding("shares"))
        self.busy_waits: bool = (self.layout.tp > 1 or shares) and counts_waiting(device)
        of_dense = parallel_state.get_pipeline_model_parallel_group
        of_experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group
        self._stages = (of_experts if self.layout.ep > 1 else of_dense)()

        config = transformer_config(recipe, self.layout)
        self.norm_epsilon = config.layernorm_epsilon
        self.pack_multiple: int = self.layout.tp if config.sequence_parallel else 1
        self.model: Any = build_stages(recipe, config, self.layout, self.pipeline_stage).to(device)
        self.collects: bool = stages_of(self.model)[-1].post_process and self.tp_rank == 0
        """Whether this rank takes losses down: one tensor-parallel rank of the last stage does."""
        if recipe.model.weights is None:
            initialise(self.model, config, recipe.train.seed, self.tp_rank)
        else:
            read_pretrained(self.model, recipe, self.tp_rank)
        self.trained = train(self, config)

    def of_each_stage(self, own: T) -> list[T]:
        # Besides the pipeline stages of all expert-parallel ranks their tensor-parallel peers are in the group.
        parts = super().of_each_stage((self.tp_rank, own))
        return [part for tp_rank, part in parts if tp_rank == self.tp_rank]

    def weights(self) -> Mapping[str, Tensor]:
        of_stage = global_tensors(self.model, torch.Tensor.detach)
        return self.of_all_stages({name: weight.cpu().clone() for name, weight in of_stage})

    def exported(self) -> Exported:
        return exported(self.model, self.recipe, self.tp_rank)

    def expert_biases(self) -> Mapping[int, Tensor]:
        """The bias of each expert, by layer of the whole model from 0, on the CPU; empty without such."""
        own = {r.layer_number - 1: r.expert_bias.float().cpu() for r in routers(self.model) if r.enable_expert_bias}
        stages = everyone(own, parallel_state.get_pipeline_model_parallel_group())
        return {layer: bias_E.clone() for stage in stages for layer, bias_E in stage.items()}

    def describe(self) -> dict[str, Any]:
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
            **({"layers": list(self.layout.layers)} if self.layout.layers else {}),
            "dp": self.layout.dp,
            "ep": self.layout.ep,
            **self.trained.describe(),
            "parameters_on_rank": sum(p.numel() for p in self.model.parameters()),
        }

    def close(self) -> None:
        """Drop the model and Megatron's process groups if they were made here; the world stays."""
        self.ddp = self.model = self.optimizer = None
        super().close()
        if self._made_groups:
            leave_groups()
            self._made_groups = False

    @property
    def output_layer(self) -> nn.Module | None:
        last = stages_of(self.model)[-1]
        return last.output_layer if last.post_process else None

    def _forwards(self, step: Step, collector: Collector) -> None:
        plan = step.plan
        self.refuse_foreign(plan)
        self.begin_experts(step)
        with evaluating(self.ddp):
            self.carry_out(step, lower_forwards, self.forward_into(collector), StepRouting(plan.lengths))
        for gpt in stages_of(self.model):
            forget_tokens(gpt)

    def frozen_passes(self, step: Step, collector: LossCollector) -> PassResult:
        """All passes of this rank through a model whose weights are frozen, in the executor."""
        self.refuse_foreign(step.plan)
        routing = StepRouting(step.plan.lengths, labels=step.labels)
        step.mark("forward and backward")
        with reaching_recomputed(self.model):
            return PassResult(self.carry_out(step, lower, self.forward_into(collector), routing))

    @contextmanager
    def frozen_model(self) -> Iterator[FrozenModel]:
        blocks = blocks_of(self.model, self.recipe, self.tp_rank)
        linears = [name for stage in self.of_each_stage(linears_in(blocks)) for name in stage]
        dtype = torch.promote_types(DTYPES[self.recipe.train.dtype], torch.float32)
        with without_gradients(self.model):
            yield FrozenModel(blocks, linears, adapter_peers(self.tp_rank), dtype, self.frozen_passes)

    @contextmanager
    def decoding(self) -> Iterator[Decoder]:
        with evaluating(self.ddp), decoder_of(self.ddp, self.model, self.device, self.gate) as decoder:
            yield decoder
        forget_tokens(self.model)

    def refuse_foreign(self, plan: StepPlan, *, host_schedule: bool = False) -> None:
        """Raise EvenloadError for a plan that this host cannot run, Megatron's own schedule or the executor."""
        ranks, stages, v_shape = self.layout.dp_cp_size, self.layout.num_stages, self.layout.v_shape
        refuse_foreign(plan, ranks, stages, host_schedule=host_schedule, v_shape=v_shape)

    def forward_into(self, collector: Collector, run: ForwardStep | None = None) -> ForwardStep:
        """Forwards, ``run`` or those that give what it wants, that hand what the last stage gives to a collector."""
        run = run or (run_for_logits if collector.wants_logits else run_batch)
        return collecting(run, lambda pack, values_1T, _: collector.add(values_1T[0], pack)) if self.collects else run

    def begin_experts(self, step: Step) -> None:
        if self.gate:
            experts = step.plan.experts
            self.gate.begin(step.plan.digest, step.mark, experts, layer_planner(experts.planner))

    def carry_out(
        self,
        step: Step,
        lowered: Callable[[StepPlan, int, int], Program],
        forward: ForwardStep,
        routing: StepRouting,
    ) -> tuple[Slice, ...]:
        """The programs of this rank; the slices that it ran."""
        self._links = self._links or links_of_device(self.layout)  # by all ranks: they run one plan
        plane, readers = self.plane_of(step.plan), readers_of(step.labels)

        def load(micro_batch: MicroBatch, prefix: PrefixStore | None) -> Batch:
            pack = build_pack(
                micro_batch,
                step.tokens_of,
                self.device,
                prefix,
                plane=plane,
                pack_multiple=self.pack_multiple,
                trunks=len(step.plan.trunks) > 0,
                sparse=step.sparse,
                **readers,
            )
            return Batch(pack, seq_params(pack, routing=routing))

        called = self.model.called if self.layout.v_shape else [self.ddp]
        trainers = [
            MegatronStage(model, gpt, load=load, step=forward, gate=self.gate)
            for model, gpt in zip(called, stages_of(self.model), strict=True)
        ]
        programs = [lowered(step.plan, stage, self.dp_cp_rank) for stage in self.stages]
        return self.execute(step, *zip(programs, trainers, strict=True))

    def _open_plane(self) -> Plane:
        return open_plane()


class MegatronWeights(Snapshots):
    """The weights of a host's model. Making it gives the host its DDP, its optimizer and the gate of its experts."""

    def __init__(self, host: MegatronHost, config: TransformerConfig) -> None:
        self._host, recipe = host, host.recipe
        own = dict(global_parameters(host.model))
        self.frozen = freeze(recipe.train.freeze, own, host.of_each_stage(list(own)))
        if recipe.sharded_experts:
            shard_experts(host.model)
        if recipe.model.moe:
            group = parallel_state.get_expert_tensor_and_model_parallel_group()
            ranks, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
            host.gate = ExpertGate(ranks, rank, sharded=recipe.sharded_experts, parts=host.layout.ep)
            for gpt in stages_of(host.model):
                bind_gate(gpt, host.gate)
        host.ddp = wrap_model(recipe, config, host.model)
        host.optimizer = build_optimizer(recipe, host.ddp)
        self._clips = recipe.train.dtype == "fp64" or is_replica()
        self._exchange = Exchange(host.model, recipe, host.tp_rank)

    def close(self) -> None:
        del self._exchange  # it holds the model

    def run(self, step: Step) -> StepResult:
        host, plan, clock = self._host, step.plan, step.clock
        host.refuse_foreign(plan, host_schedule=plan.in_host_schedule)
        labels = step.labels_of_all
        weights = labels and labels.weights
        divisor = checked_divisor(plan.lengths, labels) if weights else None
        reduction = Reduction(host.ddp, plan, clock, divisor, self._exchange)
        routing = StepRouting(plan.lengths, labels=step.labels, record=host.records_routes)
        host.routes = {} if routing.routes is None else routing.routes
        forward = collecting(run_batch, reduction.count) if host.collects else run_batch
        if step.collector:
            forward = host.forward_into(step.collector, forward)
        host.begin_experts(step)
        step.mark("forward and backward")
        host.ddp.zero_grad_buffer()
        host.optimizer.zero_grad()
        if plan.in_host_schedule:
            batches = PlannedBatches.of_rank(
                plan, host.dp_cp_rank, step.tokens_of, host.device, routing=routing, labels=step.labels
            )
            batches.pack_multiple = host.pack_multiple
            with reaching_recomputed(host.model) if host.recipe.train.recompute else nullcontext():
                executed = run_stock(host.ddp, batches, forward, reduction, step.mark, clock, host.gate)
        else:
            with reduction.computing():
                executed = host.carry_out(step, lower, forward, routing)
            step.mark("gradient sum")
            reduction.finalize([host.ddp])
        (loss_sum, num_targets), busy = reduction.totals, clock.read()
        loss, loads = loss_sum / (reduction.divisor or 1), tuple(host.gate.loads) if host.gate else ()
        branches = (reduction.branch, *((COPIED,) if any(load.copies for load in loads) else ()))
        for gpt in stages_of(host.model):
            forget_tokens(gpt)
        stretches_s = host.gate.stretches_s if host.gate and host.device.type == "cpu" else ()
        busy_s = busy.total_s, busy.forward_s
        return StepResult(loss, num_targets, *busy_s, executed, branches, loads, stretches_s)

    def gradients(self) -> dict[str, Tensor]:
        gather_shards(self._host.ddp)
        return {name: gradient.cpu().clone() for name, gradient in global_gradients(self._host.model)}

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        return gradient_norm(self._host.model, self._host.tp_rank)

    def update(self, lr: Any) -> float:
        host = self._host
        for group in host.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        norm = commit(self.norm({})) if self._clips else None
        if norm is not None:
            self._clip(norm)
        move_biases(host.ddp)
        _, megatron_norm, _ = host.optimizer.step()
        return float(megatron_norm) if norm is None else norm

    def _clip(self, norm: float) -> None:
        """Megatron's rule of clipping, which it has for float32 and norms of its own only."""
        limit = self._host.recipe.train.clip_grad
        if limit > 0 and (factor := limit / (norm + 1e-6)) < 1.0:
            self._host.ddp.scale_gradients(factor)

    def digest(self) -> int:
        return self._exchange.digest(torch.Tensor.detach)

    def optimizer_states(self) -> Mapping[str, AdamState]:
        return optimizer_states(self._host.model, self._host.optimizer)

    @torch.no_grad()
    def receive(self, across: JobGroup, source: int) -> None:
        own, states = self._host.optimizer, adam_states(self._host.optimizer)
        has_them = across.place.replica == place_in(across.sizes, source).replica
        steps = across.from_rank(source, float(states[0]["step"]) if states else 0.0)
        trained = [parameter for parameter in self._host.model.parameters() if parameter.requires_grad]
        for number in range(len(ROWS)):
            values = {p: rows_of(own, p)[number].view(p.shape).clone() for p in trained}
            if not has_them:
                for flat in values.values():
                    flat.zero_()
            self._exchange.sum(values.__getitem__)
            for parameter in trained:
                write_row(own, parameter, number, values[parameter].flatten())
                if number == 0:
                    parameter.copy_(values[parameter])
        for state in states:
            state["step"].fill_(steps)

    def describe(self) -> dict[str, Any]:
        config = self._host.ddp.ddp_config
        return {
            "distributed_optimizer": config.use_distributed_optimizer,
            "overlap_grad_reduce": config.overlap_grad_reduce,
        }

    def save(self, directory: Path) -> None:
        """Write model, optimizer and random states into an existing empty directory. Collective."""
        checkpoint.save(self._host, directory)

    def snapshot(self, directory: Path, group: Group) -> Callable[[], None]:
        return checkpoint.snapshot(self._host, directory, group)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote, on any number of ranks and any TP x PP. Collective."""
        checkpoint.load(self._host, directory)
