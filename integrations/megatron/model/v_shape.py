"""Two stages of a pipeline on each device, in a V: device r of P has stages r and 2P-1-r (ZBV, arXiv 2405.15362).

Megatron-Core's own virtual stages are interleaved: its chunk k of device r is stage kP + r. Here each stage is the
GPTModel of one rank in a pipeline of 2P, whose modules ask their pipeline's group for a rank and a size alone. So its
layers have their numbers in the whole model, its ends are the ends, and what is saved of it is what is saved without a
V. To DDP, optimizer and checkpoints both are one model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from torch import nn


class StagePlace(NamedTuple):
    """A stage of a pipeline, as its modules ask a process group for it."""

    stage: int
    num_stages: int

    def rank(self) -> int:
        return self.stage

    def size(self) -> int:
        return self.num_stages

    def groups(self) -> ProcessGroupCollection:
        """Megatron's groups, with this place in the pipeline; no other device has a copy of the embedding."""
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.pp, groups.embd = self, None
        return groups


class VShaped(nn.Module):
    """The stages of a device, the earlier one first. It has no forward: passes run through one of them (`called`)."""

    pre_process = share_embeddings_and_output_weights = False
    """So Megatron sums no gradient of an embedding over devices."""

    def __init__(self, first: Any, last: Any) -> None:
        super().__init__()
        self.config = first.config
        self.parts = nn.ModuleList([first, last])
        self.called = [first, last]
        """The stages as passes call them."""
        if first.pre_process and first.share_embeddings_and_output_weights:
            _tie(first, last)

    def in_half(self) -> Any:
        """Have the weights in bfloat16, and the ends change between it and float32."""
        self.called = [Float16Module(gpt.config, gpt) for gpt in self.parts]
        return self

    def sharded_state_dict(self, prefix: str = "", **how: Any) -> dict[str, Any]:
        """As Megatron's modules have it: by the names in `state_dict`, what is stored by those in the whole model."""
        states = [part.sharded_state_dict(**how) for part in stages_of(self)]
        return {f"{prefix}parts.{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}


def stages_of(model: nn.Module) -> list[Any]:
    """The GPTModels of this device's stages, the earlier one first."""
    return list(model.parts) if isinstance(model, VShaped) else [model]


def _tie(first: Any, last: Any) -> None:
    """Give the output layer the embedding's weight, as Megatron has it where one stage holds both."""
    last.output_layer.weight = None
    last.shared_embedding_or_output_weight = first.shared_embedding_or_output_weight
    last.tie_embeddings_and_output_weights_state_dict = lambda *_: None
