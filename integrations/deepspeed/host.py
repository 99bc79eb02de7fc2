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
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from ...core.plan.branches import DUMMIES, SUM_AFTER_PASSES
from ...core.plan.step_plan import Slice, StepPlan
from ...core.recipe.recipe import Recipe
from ...core.simulate.step import SpanKind
from ...runtime.attention.pack import IGNORE, Pack, TokensOf, build_pack
from ...runtime.attention.prefix import PrefixStore
from ...runtime.measure.busy import BusyClock, counts_waiting
from ...runtime.stage.offload import layers_of, offloading
from ...runtime.world.plane import Plane
from ...runtime.world.world import World
from ..host import Mark
from . import attention
from .engine import full_weights, make_engine, one_reduction
from .engine_host import EngineHost
from .jobs import num_added, passes_of_rank
from .model import build_model, recompute_layers, recomputing
from .passes import Pass
from .unmodified.supported import refuse_unsupported

log = logging.getLogger("evenload")

SPAN_KIND_OF: dict[str, SpanKind] = {"forward": "F", "prefix": "F", "replay": "R", "backward": "B"}
"""How the busy clock counts a pass."""


class DeepSpeedHost(EngineHost):
    """Runs plans on DeepSpeed's engine.

    ``busy_s`` leaves gradient reduction out under ZeRO 0, 1 and 2. ZeRO 3 gathers parameters and reduces gradients
    inside every pass, and ranks that share a micro-batch exchange keys and values there, so then, by wall time or on a
    GPU, it holds the waiting for other ranks as well.
    """

    pipeline_stage = 0

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(recipe, world)
        self.dp_cp_rank = world.rank
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

    def weights(self) -> dict[str, torch.Tensor]:
        return full_weights(self.engine)

    def of_all_stages(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `Host.of_all_stages`: there is one."""
        return tensors

    def _own_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def _update(self) -> None:
        self.engine.step()

    def _run(
        self, plan: StepPlan, tokens_of: TokensOf, num_targets: int, mark: Mark, clock: BusyClock
    ) -> tuple[torch.Tensor, tuple[Slice, ...], tuple[str, ...]]:
        passes = passes_of_rank(plan, self.dp_cp_rank, self.world.size, equal=self.stage == 3)
        added = num_added(plan, self.dp_cp_rank, passes) if self.stage == 3 else 0
        self._tell_of_dummies(added, len(passes))
        plane = self._plane_of(plan)
        mark("loading the samples")
        prefix = PrefixStore.of_plan(plan, self.dp_cp_rank)
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
                with clock.running(SPAN_KIND_OF[one.kind], one.number):
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
        executed = tuple(piece for one in passes if one.is_backward for piece in packs[one.micro_batch].slices)
        return total, executed, (SUM_AFTER_PASSES, *([DUMMIES] if added else []))

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

    def _tell_of_dummies(self, added: int, num_passes: int) -> None:
        """Warn once where ZeRO 3 makes ranks run passes for nothing."""
        if added and not self._told_of_dummies:
            self._told_of_dummies = True
            log.warning(
                "ZeRO 3: the plan's ranks run forwards and backwards in different orders; %d of the %d passes of rank "
                "%d are dummies that keep it in step",
                added,
                num_passes,
                self.dp_cp_rank,
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
