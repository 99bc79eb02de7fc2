"""`Host` on DeepSpeed: one planned step through `deepspeed.initialize`'s engine with ZeRO 0, 1, 2 or 3.

    loss of a micro-batch = sum of its token losses * share / T,   T = target tokens of the global batch

with share 1 where gradients are summed over ranks (ZeRO 0, 1, 2) and the number of ranks where the engine averages
(ZeRO 3). Gradients of a step are then those of the mean token loss of the batch, whatever the plan: whole sequences or
slices, on one rank or shared by several, forwards whose activations are kept or that are replayed before their
backward, the same groups in both directions or others. The loss of a token is counted where it is computed with
gradients, once.

Measured against a plain run of the same weights, 2 gloo ranks, float32: see docs/deepspeed.md.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy

from ...core.errors import EvenloadError
from ...core.recipe import Recipe
from ...core.simulate import Kind
from ...core.workload import StepPlan
from ...runtime.busy import BusyClock, counts_waiting
from ...runtime.kernels import choose_kernel
from ...runtime.offload import layers_of, offloading
from ...runtime.pack import IGNORE, Pack, TokensOf, build_pack, count_targets
from ...runtime.plane import Plane
from ...runtime.prefix import PrefixStore
from ...runtime.world import World
from ..host import UPDATE, Mark, StepResult, no_mark
from . import attention, checkpoint
from .engine import discard_gradients, full_gradients, full_weights, make_engine, one_reduction
from .jobs import num_added, passes_of_rank
from .model import build_model, recompute_layers, recomputing
from .passes import Pass
from .supported import refuse_unequal_replay, refuse_unsupported

log = logging.getLogger("evenload")

KINDS: dict[str, Kind] = {"forward": "F", "prefix": "F", "replay": "R", "backward": "B"}
"""How the busy clock counts a pass."""


class DeepSpeedHost:
    """Runs plans on DeepSpeed. Making one is collective.

    ``busy_s`` leaves gradient reduction out under ZeRO 0, 1 and 2. ZeRO 3 gathers parameters and reduces gradients
    inside every pass, and ranks that share a micro-batch exchange keys and values there, so then, by wall time or on a
    GPU, it holds the waiting for other ranks as well.

    Args:
        recipe: with ``model.vocab_size`` resolved, or ``model.config``.
        world: this process.

    Raises:
        EvenloadError: the recipe asks for what DeepSpeed cannot honour here.
    """

    pipeline_stage = 0

    def __init__(self, recipe: Recipe, world: World) -> None:
        refuse_impossible(recipe)
        self.layout = recipe.layout(world.size)
        self.plane_rank = world.rank
        self.world = world
        self.recipe = recipe
        model = build_model(recipe)
        refuse_unsupported(model.config, recipe.data.max_length)
        if recipe.train.recompute:
            recompute_layers(model)
        self._one_logit = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(model) else {}
        self.engine = make_engine(model, recipe, world.size)
        self.stage = int(self.engine.zero_optimization_stage())
        shares = any(plugin.shares for plugin in recipe.enabled())
        self.busy_waits = (self.stage == 3 or shares) and world.size > 1 and counts_waiting(world.device)
        self._told_of_dummies = False
        self._plane: Plane | None = None

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
            norm = norm_of(p.grad for p in self.engine.module.parameters()) if self.stage == 0 else None
            self.engine.step()
            if norm is None:
                norm = float(self.engine.get_global_grad_norm())
        return StepResult(grad_norm=norm, **result, spans=clock.spans(self.pipeline_stage, self.plane_rank))

    def gradients(self, plan: StepPlan, tokens_of: TokensOf) -> tuple[StepResult, Mapping[str, torch.Tensor]]:
        """See `Host.gradients`."""
        result = self._accumulate(plan, tokens_of, no_mark, BusyClock(self.world.device))
        gradients = full_gradients(self.engine)
        discard_gradients(self.engine)
        return StepResult(grad_norm=norm_of(gradients.values()), **result), gradients

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that the forward uses, by name, float32 on the CPU. Collective."""
        return full_weights(self.engine)

    def save(self, directory: Path) -> None:
        """See `Host.save`."""
        checkpoint.save(self.engine, directory)

    def load(self, directory: Path) -> None:
        """See `Host.load`. Raises EvenloadError where there is nothing to load."""
        checkpoint.load(self.engine, directory)

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
        passes = passes_of_rank(plan, self.plane_rank, self.world.size, equal=self.stage == 3)
        num_targets = count_targets(plan.sequences)
        if num_targets == 0:
            raise EvenloadError(
                "the batch has no target token", f"{len(plan.sequences)} sequences", "use longer samples"
            )
        if plan.replayed or plan.recompute:
            refuse_unequal_replay(self.engine.module)
        self._tell_of_dummies(plan, passes)
        plane = self._plane_of(plan)
        mark("loading the samples")
        prefix = PrefixStore.of_plan(plan, self.plane_rank)
        packs = {
            micro_batch: build_pack(micro_batch, tokens_of, self.world.device, prefix, plane=plane)
            for micro_batch in dict.fromkeys(one.micro_batch for one in passes)
        }
        share = self.world.size if self.stage == 3 else 1
        losses: dict[int, torch.Tensor] = {}
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        with ExitStack() as open_step:
            reduction = open_step.enter_context(one_reduction(self.engine, sum(one.is_backward for one in passes)))
            for number, one in enumerate(passes):
                mark(f"{one.kind}, pass {number + 1} of {len(passes)}")
                pack = packs[one.micro_batch]
                if one.is_shared and plane is not None:
                    plane.meet(one.number, plan.digest, one.micro_batch.ranks, one.direction)
                with clock.running(KINDS[one.kind], one.number):
                    if one.kind == "prefix":
                        with torch.no_grad():
                            self.engine(**call_of(pack), **self._one_logit)
                    elif one.is_backward:
                        reduction.before_backward()
                        self.engine.backward(losses.pop(one.graph) * (share / num_targets), scale_wrt_gas=False)
                    else:
                        with self._recomputing(plan, one), self._offloading(plan, one):
                            losses[one.graph] = loss_sum(self.engine, pack)
                        total += losses[one.graph].detach().double()
                        reduction.after_forward()
            mark("gradient reduction")
            with clock.noting("G") if self.stage < 3 else nullcontext():
                open_step.close()
        if prefix is not None:
            prefix.check_empty()
        dist.all_reduce(total)
        busy = clock.read()
        return {
            "loss": float(total) / num_targets,
            "num_targets": num_targets,
            "busy_s": busy.total_s,
            "forward_s": busy.forward_s,
            "executed": tuple(piece for one in passes if one.is_backward for piece in packs[one.micro_batch].slices),
        }

    def _plane_of(self, plan: StepPlan) -> Plane | None:
        """What ranks share micro-batches over; made, by all ranks together, for the first plan that needs it."""
        if plan.shared and self._plane is None:
            self._plane = Plane.make([tuple(range(self.world.size))], node_ranks=plan.limits.node_ranks)
        return self._plane

    def _offloading(self, plan: StepPlan, one: Pass) -> AbstractContextManager[Any]:
        """A forward's activations in host memory, by the plan's share. A replay's are wanted right away."""
        if not plan.offload or one.kind != "forward" or one.number < 0:
            return nullcontext()
        return offloading(plan.offload[one.number], layers_of(self.engine.module), self.world.device)

    def _recomputing(self, plan: StepPlan, one: Pass) -> AbstractContextManager[None]:
        """The layers that a forward's backward runs again: as many as the plan says, else what the recipe says.

        A replay is a recomputation already. ZeRO 3 gathers parameters in recomputed layers, so there the backwards of a
        step are all of one sort: with a plan's numbers, of the one that recomputes most.
        """
        if plan.recompute:
            row = plan.recompute[0]
            number = max(row) if self.stage == 3 else row[one.number] if one.number >= 0 else 0
            return recomputing(self._checkpointed(), number)
        if not self.recipe.train.recompute:
            return nullcontext()
        mixed = any(plan.micro_batches[i].slices for i in plan.kept)
        keeps = (one.kind == "replay" or not one.micro_batch.slices) and not (mixed and self.stage == 3)
        return recomputing(self._checkpointed(), 0) if keeps else nullcontext()

    def _checkpointed(self) -> Sequence[Any]:
        """The decoder layers, able to recompute their activations. Raises EvenloadError if they are not."""
        blocks: Sequence[Any] = layers_of(self.engine.module)
        if not hasattr(blocks[0], "_gradient_checkpointing_func"):
            recompute_layers(self.engine.module)
            for block in blocks:
                block.gradient_checkpointing = False
        return blocks

    def _tell_of_dummies(self, plan: StepPlan, passes: tuple[Pass, ...]) -> None:
        """Warn once where ZeRO 3 makes ranks run passes for nothing."""
        added = num_added(plan, self.plane_rank, passes) if self.stage == 3 else 0
        if added and not self._told_of_dummies:
            self._told_of_dummies = True
            log.warning(
                "ZeRO 3: the plan's ranks run forwards and backwards in different orders; %d of the %d passes of rank "
                "%d are dummies that keep it in step",
                added,
                len(passes),
                self.plane_rank,
            )


def loss_sum(model: Any, pack: Pack) -> torch.Tensor:
    """Sum of the token losses of a pack, in float32 at least; 0 with zero gradients for a dummy."""
    logits_TV = model(**call_of(pack)).logits[0]
    if logits_TV.dtype in (torch.bfloat16, torch.float16):
        logits_TV = logits_TV.float()
    return cross_entropy(logits_TV, pack.labels_T, ignore_index=IGNORE, reduction="sum")


def call_of(pack: Pack) -> dict[str, Any]:
    """The arguments of the model's call for a pack."""
    return {
        "input_ids": pack.tokens_T[None],
        "position_ids": pack.positions_T[None],
        "use_cache": False,
        attention.PACK: pack,
    }


def _parameters(model: Any) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def norm_of(tensors: Any) -> float:
    """Of all values of some tensors, in float64; None among them count as zeros."""
    norms = [t.detach().double().norm() for t in tensors if t is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def refuse_impossible(recipe: Recipe) -> None:
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
