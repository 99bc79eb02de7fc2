"""Tenants on DeepSpeed: a frozen Hugging Face model, or a stage of one, in an engine without an optimizer, its linear
layers adapted.

    ZeRO 0, 1, 2    nothing is left that they divide or reduce: the engine puts the model on its device, and that is
                    all it does; it is made with ZeRO 0, as 1 and 2 refuse to stand without an optimizer
    ZeRO 3          the engine divides the frozen weights, and gathers and releases them in every pass
    pipelines       the engine gives the stages their layers and their process groups

Passes with a backward call the engine's module, and autograd itself: the engine's own forward and backward count what
an optimizer will do, and refuse to run without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...core.errors import EvenloadError
from ...core.recipe.recipe import Recipe
from ...runtime.adapters.adapters import Adapters
from ...runtime.adapters.peers import AdapterPeers
from ...runtime.adapters.places import AdaptedBlock, Place, Site
from ...runtime.attention.pack import Pack
from ...runtime.stage.executor import Graph
from ...runtime.stage.offload import layers_of
from ...runtime.world.agreement import everyone
from ..host.scoring import LossCollector
from ..host.step import Step
from ..host.tenants import Tenants
from ..host.trained import Passed
from ..huggingface import attention
from .engine.ds_config import SHARDED, ds_config
from .engine.engine import Releases, prepare_deepspeed
from .engine.host import DeepSpeedHost
from .engine.model import enable_recomputing
from .engine.stage import EngineStage, call_of
from .pipeline.host import PipelineHost
from .pipeline.model import StageModule
from .pipeline.stage import PipelineStage

_ATTENTION = ("self_attn", "attention")
"""What the models that evenload knows call the attention of a layer."""


class DataParallelTenants(Tenants):
    """Adapters beside a frozen model without pipeline stages, under ZeRO 0, 1, 2 or 3. Ranks run different numbers of
    micro-batches but under 3."""

    def __init__(self, host: DeepSpeedHost, model: Any) -> None:
        super().__init__(host.device)
        self._host = host
        names = linear_names(model)
        # Transformers' own hook for recomputation would have ZeRO 3 gather the embedding in every backward.
        model.disable_input_require_grads()
        self.frozen = frozenset(name for name, _ in model.named_parameters())
        host.engine = frozen_engine(model, host.recipe, host.world.size)
        module = host.engine.module
        blocks = blocks_of(layers := layers_of(module), names)
        own = [place.name for block in blocks for site in block.sites for place in site.places]
        peers = AdapterPeers(dist.group.WORLD if host.world.size > 1 else None)
        self.adapters = Adapters(blocks, own, peers, torch.float32, host.device)
        module.get_input_embeddings().register_forward_hook(need_gradient)
        if host.recipe.deepspeed.zero_stage == SHARDED:
            enable_recomputing(module, layers)
            replay_first(layers)

    def passes(self, step: Step, collector: LossCollector) -> Passed:
        program, branches = self._host.program_of(step.plan, "none")
        return Passed(self._host.execute(step, (program, FrozenStage(self._host, step, collector))), branches)


class FrozenStage(EngineStage):
    """The passes of a frozen model; the collector takes their losses down."""

    def __init__(self, host: DeepSpeedHost, step: Step, collector: LossCollector) -> None:
        self._releases = Releases(host.engine.module)
        super().__init__(host, step, self._releases, None, None, weight=1.0, collector=collector)
        self._offload = host.engine.optimizer

    def _logits_of(self, pack: Pack) -> Tensor:
        logits_TV: Tensor = self._engine.module(**call_of(pack)).logits[0]
        return logits_TV

    def backward(self, graph: Graph, gradient: Tensor | None) -> None:
        self._releases.before_backward()
        torch.autograd.backward(graph.output)
        if self._offload is not None:
            self._offload.release_backward_leftovers()


class PipelineTenants(Tenants):
    """Each rank has the adapters of its own stage's layers; ranks of a stage own a run of each."""

    def __init__(self, host: PipelineHost, module: StageModule) -> None:
        super().__init__(host.device)
        self._host = host
        own = {id(parameter): name for name, parameter in module.global_parameters().items()}
        linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        names = {id(layer): own[id(layer.weight)].removesuffix(".weight") for layer in linears}
        host.engine = frozen_engine(module, host.recipe, host.layout.dp)
        grid = host.engine.grid
        stages = grid.get_pipe_parallel_group()
        self.frozen = frozenset(name for part in everyone(list(own.values()), stages) for name in part)
        blocks = blocks_of(module.blocks, names)
        here = [place.name for block in blocks for site in block.sites for place in site.places]
        adapted = [name for part in everyone(here, stages) for name in part]
        peers = AdapterPeers(grid.get_data_parallel_group(), stages)
        self.adapters = Adapters(blocks, adapted, peers, torch.float32, host.device)
        if host.engine.is_first_stage():
            module.forward_funcs[0].register_forward_hook(need_gradient)

    def passes(self, step: Step, collector: LossCollector) -> Passed:
        ((_, program),) = self._host.programs_of(step.plan)
        return Passed(self._host.execute(step, (program, FrozenPipelineStage(self._host, step, collector))))


class FrozenPipelineStage(PipelineStage):
    """The passes of a frozen stage; the collector takes their losses down."""

    def __init__(self, host: PipelineHost, step: Step, collector: LossCollector) -> None:
        super().__init__(host, step, weight=1.0, collector=collector)

    def backward(self, graph: Graph, gradient: Tensor | None) -> Tensor | None:
        torch.autograd.backward(graph.output, gradient)
        return None if graph.received is None else graph.received.grad

    def _through(self, received: Tensor | None, pack: Pack, **how: Any) -> Tensor:
        output: Tensor = self._engine.module(received, pack, **how)
        return output


def frozen_engine(model: nn.Module, recipe: Recipe, world_size: int) -> Any:
    """A `DeepSpeedEngine` around a model whose parameters get no gradients. Collective; needs a process group."""
    prepare_deepspeed()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = ds_config(recipe, world_size)
    if recipe.deepspeed.zero_stage != SHARDED:
        config["zero_optimization"] = {"stage": 0}
        if recipe.train.dtype == "bf16":
            # DeepSpeed's own bfloat16 comes with an optimizer; buffers keep their precision there, too.
            config["bf16"] = {"enabled": False}
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def blocks_of(layers: Sequence[nn.Module], names: Mapping[int, str]) -> list[AdaptedBlock]:
    """Decoder layers as adapters see them: every linear layer inside, under its Hugging Face name.

    ``names``: of all modules that are linear layers, by id. Raises EvenloadError for layers of another build.
    """
    return [AdaptedBlock(_carrier(layer), _pack_of, tuple(_sites(layer, names))) for layer in layers]


def linear_names(model: nn.Module) -> dict[int, str]:
    """Module paths of all linear layers of a model, by id."""
    return {id(module): name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def need_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    """Hook of an embedding: what it gives needs a gradient, so that every pack has a backward, one of no tenant too,
    and ZeRO 3 counts the same inputs in every pass."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def replay_first(layers: Sequence[Any]) -> None:
    """Let the backward of a recomputed layer begin with its replay, and the replay run to the layer's end.

    Else it begins with the first backward that asks for an activation, which may be an adapter's: ranks whose packs are
    of other tenants would gather the weights of ZeRO 3 in other orders, and wait for each other for ever. `layers` can
    recompute already.
    """
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_marked, layer._gradient_checkpointing_func)


def _marked(checkpoint: Any, forward: Any, *arguments: Any) -> Any:
    ask: Any = _Asking.apply
    return checkpoint(lambda *inner: ask(forward(*inner)), *arguments)


class _Asking(torch.autograd.Function):
    """Changes nothing; its backward asks for an activation of the checkpoint that it runs in."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return gradient


def _carrier(layer: nn.Module) -> nn.Module:
    """The attention of a layer: the pack is an argument of its call, and it runs first in every replay. The layer's own
    hooks are no use: Transformers replays a layer's ``forward``, not its call."""
    replaying = [name for name, module in layer.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = [name for name in replaying if name]
    attentions = [module for name in _ATTENTION if isinstance(module := getattr(layer, name, None), nn.Module)]
    if inner or not attentions:
        what = "adapters do not know which tenants run in the layers of this model"
        detail = f"{type(layer).__name__}.{inner[0]} recomputes itself" if inner else f"{type(layer).__name__}"
        raise EvenloadError(what, detail, f"use a model whose layers recompute as a whole, with {_ATTENTION[0]}")
    return attentions[0]


def _sites(layer: nn.Module, names: Mapping[int, str]) -> Iterator[Site]:
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            # Not the weight's shape: under ZeRO 3 a rank holds a part.
            outputs, inputs = module.out_features, module.in_features
            yield Site(module, (Place(names[id(module)], outputs, inputs, (0, outputs), (0, inputs)),))


def _pack_of(_: tuple[Any, ...], words: dict[str, Any]) -> Pack:
    pack: Pack = words[attention.PACK]
    return pack
