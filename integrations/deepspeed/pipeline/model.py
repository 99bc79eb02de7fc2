"""A stage of a Hugging Face model as DeepSpeed's `PipelineModule`: its decoder layers, the ends at the ends. In a V of
stages (`Limits.v_shape`) a device has two of them: DeepSpeed, who knows devices, is given the layers in their order.

    layer 0            embedding, of the first stage
    layers 1 .. L      decoder layers, equally many on every stage or as `Layout.layers` says
    layers L+1, L+2    final norm and output layer, of the last stage

Each rank has memory for its own stage alone (`keeping`), with the weights that the seed gives it without a pipeline: a
run starts from the same weights however many stages it has. `forward` is our own: a pack travels with the call, rotary
tables are computed once a stage, and the number of recomputed layers is the call's.

Shape legend: T = slots of a pack, C = hidden size, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import io
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from ....core.errors import refuse_first
from ....core.machine.layout import Layout
from ....core.recipe.families import FAMILIES
from ....core.recipe.recipe import Recipe
from ....runtime.attention.pack import Pack
from ...huggingface import attention
from ...huggingface.folders.model_config import model_config
from ...huggingface.models import refuse_unsupported
from ..engine.engine import prepare_deepspeed
from ..engine.model import build_model, enable_recomputing, recomputing

_DENSE = [family for family in FAMILIES.values() if family.experts == "none"]
_FINAL_NORM = {"mistral": "norm", **{one.model_type: one.modules["final_norm"].split(".")[-1] for one in _DENSE}}
"""Models that are an embedding, layers, a norm and an output layer, with nothing between, and their norm's name."""


class _Parts(NamedTuple):
    config: Any
    rotary: nn.Module
    layers: list[nn.Module]
    """All that hold weights, in order; those of other devices on the meta device."""
    names: dict[int, str]
    """Of every parameter in the whole model, by its id."""


class Stage(NamedTuple):
    """The layers of a stage."""

    embedding: nn.Module | None
    """Of the first one."""
    blocks: list[nn.Module]
    """Decoder layers."""
    ends: list[nn.Module]
    """Norm and output layer, of the last one."""


class StageModule(PipelineModule):  # type: ignore[misc]
    """The layers of a device. ``parts``: of the whole model; those of this device hold weights."""

    def __init__(self, parts: _Parts, layout: Layout, device: torch.device) -> None:
        runs = [_runs(len(parts.layers), layout, number) for number in range(layout.pp)]
        layers = [parts.layers[i] for of_device in runs for run in of_device for i in run]
        borders = [0, *accumulate(sum(map(len, of_device)) for of_device in runs)]
        super().__init__(layers, topology=_topology(layout), partition_method=borders)
        self.config = parts.config
        self.stage_layers = layout.layers
        self.stages = [_stage(parts.layers, run) for run in runs[self.stage_id]]
        """Ascending."""
        self.rotary = parts.rotary.to(device)
        self._names = {parts.names[id(p)]: p for p in self.parameters()}
        self.num_weights = sum(p.numel() for layer in parts.layers for p in layer.parameters())
        """Of the whole model."""
        for parameter in self.parameters():
            # DeepSpeed's clipping in float32 counts parameters after the first stage only where they say so.
            parameter.model_parallel = True

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers of this device."""
        return [block for stage in self.stages for block in stage.blocks]

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by the names that they have in the whole model."""
        return self._names

    def forward(
        self, received_1TC: Tensor | None, pack: Pack, *, part: int = 0, recomputed: int = 0, head: bool = True
    ) -> Tensor:
        """Hidden states [1, T, C] for the next stage; of the last one logits [1, T, V], unless ``head`` is off.

        Args:
            received_1TC: of the stage before; None at the first one.
            part: which of this device's `stages`.
            recomputed: so many of the stage's decoder layers, the first ones, keep their inputs alone.
        """
        embedding, blocks, ends = self.stages[part]
        hidden_1TC = cast(Tensor, received_1TC if embedding is None else embedding(pack.tokens_T[None]))
        positions_1T = pack.positions_T[None]
        tables = self.rotary(hidden_1TC, positions_1T)
        with recomputing(blocks, recomputed):
            for block in blocks:
                hidden_1TC = block(
                    hidden_1TC,
                    attention_mask=None,
                    position_ids=positions_1T,
                    position_embeddings=tables,
                    use_cache=False,
                    **{attention.PACK: pack},
                )
        for layer in ends if head else ():
            hidden_1TC = layer(hidden_1TC)
        return hidden_1TC

    def _partition_layers(self, method: list[int]) -> None:
        """As ``method`` says, whatever DeepSpeed would count: the first layers of the devices."""
        device = self._topo.get_coord(self.global_rank).pipe
        self.parts = method
        self._set_bounds(self.parts[device], self.parts[device + 1])


def build_stage(recipe: Recipe, layout: Layout, rank: int, device: torch.device) -> StageModule:
    """This rank's stages, in float32 on the device. Collective. Raises EvenloadError where it cannot be cut out."""
    parts = _take_apart(recipe, layout, _topology(layout).get_coord(rank).pipe)
    prepare_deepspeed()
    deepspeed.init_distributed()
    with contextlib.redirect_stdout(io.StringIO()):  # stdout belongs to --json; DeepSpeed prints its partition there
        return StageModule(parts, layout, device)


def _topology(layout: Layout) -> PipeDataParallelTopology:
    return PipeDataParallelTopology(num_pp=layout.pp, num_dp=layout.dp)


def _borders(num_layers: int, layout: Layout) -> list[int]:
    """First layers of the stages among embedding, decoder layers, norm and output layer."""
    each = layout.layers or ((num_layers - 3) // layout.num_stages,) * layout.num_stages
    return [0, *(1 + before for before in accumulate(each[:-1])), num_layers]


def _runs(num_layers: int, layout: Layout, device: int) -> list[range]:
    """The layers of each stage of a device, among all."""
    stages = [range(*ends) for ends in pairwise(_borders(num_layers, layout))]
    return [stages[stage] for stage in layout.stages_of_device(device)]


def _stage(layers: list[nn.Module], run: range) -> Stage:
    own, first, ends = [layers[i] for i in run], int(run.start == 0), 2 * int(run.stop == len(layers))
    return Stage(own[0] if first else None, own[first : len(own) - ends], own[len(own) - ends :])


def _take_apart(recipe: Recipe, layout: Layout, device: int) -> _Parts:
    config = model_config(recipe)
    refuse_unsupported(config, recipe.data.max_length)
    _refuse_uncut(config, layout)
    own = [i for run in _runs(config.num_hidden_layers + 3, layout, device) for i in run]
    model = build_model(recipe, parts=lambda whole: [*(_layers(whole)[i] for i in own), whole.base_model.rotary_emb])
    enable_recomputing(model, model.base_model.layers)  # `recomputing` says when
    names = {id(p): name for name, p in model.named_parameters()}
    return _Parts(model.config, model.base_model.rotary_emb, _layers(model), names)


def _layers(model: Any) -> list[nn.Module]:
    base = model.base_model
    norm = getattr(base, _FINAL_NORM[model.config.model_type])
    return [model.get_input_embeddings(), *base.layers, norm, model.get_output_embeddings()]


def _refuse_uncut(config: Any, layout: Layout) -> None:
    layers, dropout = config.num_hidden_layers, getattr(config, "hidden_dropout", 0.0)
    known, tied = ", ".join(sorted(_FINAL_NORM)), "tie_word_embeddings: first and last stage would share a weight"
    what, config_file = "the model cannot be cut into pipeline stages", "in the model's config"
    divide, stages = "choose a pp that divides the number of layers", layout.num_stages
    uneven = layers % stages != 0 and not layout.layers
    refuse_first(
        (config.model_type not in _FINAL_NORM, what, f"model_type {config.model_type}", f"use {known}"),
        (getattr(config, "tie_word_embeddings", False), what, tied, f"set tie_word_embeddings to false {config_file}"),
        (bool(dropout), what, f"hidden_dropout = {dropout}", f"set it to 0 {config_file}"),
        (uneven, what, f"{layers} layers, parallel.pp {layout.pp} with {stages} stages", divide),
    )
