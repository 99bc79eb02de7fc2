"""Tenants on Megatron-Core: a frozen GPTModel without DDP and without an optimizer, its linear layers adapted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ...core.plan.branches import SUM_AFTER_PASSES
from ...core.plan.program import lower
from ...core.recipe.recipe import Recipe
from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.peers import AdapterPeers
from ...runtime.adapters.places import AdaptedBlock, Place, Site
from ...runtime.attention.pack import Pack
from ...runtime.experts.routing import StepRouting
from ...runtime.world.agreement import everyone
from ..host.foreign_plans import refuse_foreign
from ..host.host import StepResult
from ..host.scoring import LossBook
from ..host.step import Step
from ..host.tenants import TenantHost, targets_of_tenants
from .batch import Batch, LossFunc, run_batch
from .forward import reaching_recomputed
from .host import MegatronHost
from .model.gpt import DTYPES
from .model.weights import global_parameters
from .pretrained.pieces import pieces_of

_LINEARS = tuple(f"{name}.weight" for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


class MegatronTenants(TenantHost, MegatronHost):
    """Trains the adapters of tenants on this process's part of the world. Every plan runs in the executor."""

    def _prepare_training(self, config: TransformerConfig) -> None:
        self._gate = self.optimizer = None
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        names = [name for name, _ in global_parameters(self.model)]
        parts = everyone(names, self._stages) if self.layout.pp > 1 else [names]
        self.frozen = frozenset(name for part in parts for name in part)
        self.ddp = Float16Module(config, self.model) if self.recipe.train.dtype == "bf16" else self.model
        blocks = blocks_of(self.model, self.recipe, self.tp_rank)
        own = [place.name for block in blocks for site in block.sites for place in site.places]
        stages = everyone(own, self._stages) if self.layout.pp > 1 else [own]
        peers = AdapterPeers(
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_model_parallel_group(),
            counts=self.tp_rank == 0,
        )
        dtype = torch.promote_types(DTYPES[self.recipe.train.dtype], torch.float32)
        self.adapters = Adapters(blocks, [name for stage in stages for name in stage], peers, dtype, self.device)

    def _describe_reduction(self) -> dict[str, Any]:
        return {"adapted_linears": len(self.adapters.linears)}

    def _run(self, step: Step) -> StepResult:
        plan, clock = step.plan, step.clock
        refuse_foreign(plan, self.layout.dp_cp_size, self.layout.pp)
        targets = targets_of_tenants(plan, step.labels)
        self.adapters.begin(plan.tenants)
        book = LossBook(len(plan.lengths), self.device)
        forward = _BookedForward(book, books=self._last and self.tp_rank == 0)
        program = lower(plan, self.pipeline_stage, self.dp_cp_rank)
        step.mark("forward and backward")
        with reaching_recomputed(self.model):
            executed = self._carry_out(step, program, forward, StepRouting(plan.lengths, labels=step.labels))
        step.mark("gradient sum")
        with clock.noting("G"):
            scores = book.scores()
            tenants = self._of_tenants(plan, targets, scores)
        busy = clock.read()
        of_rank = busy.total_s, busy.forward_s, executed, (SUM_AFTER_PASSES,)
        return StepResult(self._loss(), sum(targets.values()), *of_rank, tenants=tenants)


class _BookedForward:
    """A ``forward_step_func`` that takes the losses of sequences down; ``books``: whether this rank does: one
    tensor-parallel rank of the last stage."""

    def __init__(self, book: LossBook, *, books: bool) -> None:
        self._book, self._books = book, books

    def __call__(self, batch: Batch, model: Any) -> tuple[Tensor, LossFunc]:
        output, loss_func = run_batch(batch, model)

        def booked(losses_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            if self._books:
                self._book.add(losses_1T.detach()[0], batch.pack)
            return loss_func(losses_1T)

        return output, booked


def blocks_of(model: nn.Module, recipe: Recipe, tp_rank: int) -> list[AdaptedBlock]:
    """The decoder layers of this rank's stage, with the linear layers that Hugging Face's model of the family has."""
    gpt: Any = model
    modules = {id(m.weight): m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    sites: dict[str, Site] = {}
    for name, parameter in global_parameters(model):
        if name.endswith(_LINEARS):
            places = tuple(_places(name, parameter, recipe, tp_rank))
            sites[name] = Site(modules[id(parameter)], places, *_sums(parameter, recipe.parallel.tp))
    return [
        AdaptedBlock(layer, _pack_of, tuple(s for n, s in sites.items() if f"layers.{layer.layer_number - 1}." in n))
        for layer in gpt.decoder.layers
    ]


def _places(name: str, parameter: nn.Parameter, recipe: Recipe, tp_rank: int) -> Iterator[Place]:
    for piece in pieces_of(name, parameter, recipe, tp_rank):
        outputs, inputs = piece.shape
        columns = piece.columns or (0, inputs)
        layer = piece.name.removesuffix(".weight")
        yield Place(layer, outputs, inputs, piece.rows, columns, piece.groups, piece.first)


def _sums(parameter: Any, tp: int) -> tuple[Any, ...]:
    if tp == 1:
        return ()
    kind = "gradients" if parameter.partition_dim == 0 else "products"
    return kind, parallel_state.get_tensor_model_parallel_group()


def _pack_of(_: tuple[Any, ...], words: dict[str, Any]) -> Pack:
    pack: Pack = words["packed_seq_params"].pack
    return pack
