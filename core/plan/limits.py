"""What the trainer and the machine allow a plan: caps and counts, and the one record of the bytes that its work takes.

The record is that of cost models, of the limits of a plan and of plan.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from pydantic import Field, NonNegativeFloat

from ..input.format import GIB
from ..input.validation import Frozen
from ..machine.layout import Layout, share_of

NO_SHARES: Mapping[str, float] = MappingProxyType({})


class MemoryCost(Frozen):
    """Bytes on one device, of the whole model (in a cost model) or of a pipeline stage (`of_stage`).

    `core.costs.memory` says when each of them is held.
    """

    fixed_bytes: NonNegativeFloat = 0.0
    """Between steps: weights, optimizer states, and gradients where the trainer keeps their buffers."""
    sharded_bytes: NonNegativeFloat = 0.0
    """The part of ``fixed_bytes`` that the trainer divides over data-parallel ranks."""
    gathered_bytes: NonNegativeFloat = 0.0
    """Whole weights next to a rank's part, where they are divided over several (ZeRO 3 gathers them for the passes)."""
    gradient_bytes: NonNegativeFloat = 0.0
    """Gradients that appear in a step's first backward and go with the update; 0 where they are in ``fixed_bytes``."""
    update_bytes: NonNegativeFloat = 0.0
    """Beyond ``fixed_bytes``, when no activation is left: gradient sum and update, with gradients and buckets."""
    pass_bytes: NonNegativeFloat = 0.0
    """Any pass while it runs, whatever its tokens: the gradient of one weight before it is added to its buffer."""
    activation_bytes_per_token: NonNegativeFloat = 0.0
    """All layers together, kept from forward to backward."""
    cut_saves_bytes_per_token: NonNegativeFloat = 0.0
    """All layers together: what a token keeps less in micro-batches of cut sequences alone, whose K and V are stored
    already."""
    head_bytes_per_token: NonNegativeFloat = 0.0
    """Kept from forward to backward besides the layers: the last one's output, norm, logits, loss, rotary angles."""
    head_working_bytes_per_token: NonNegativeFloat = 0.0
    """What output layer and loss take while they run, beyond what they keep: copies of the logits, their gradient."""
    working_bytes_per_token: NonNegativeFloat = 0.0
    """What the backward of one layer takes while it runs, beyond what its forward kept."""
    kv_bytes_per_token: NonNegativeFloat = 0.0
    """All layers together: K and V of a sequence that is cut, kept for its later slices."""
    replay_bytes_per_token: NonNegativeFloat = 0.0
    """All layers together, while a replayed micro-batch runs backward; 0 means ``activation_bytes_per_token``."""
    kv_grad_bytes_per_token: NonNegativeFloat = Field(default=0.0, exclude=True)
    """All layers together: dK and dV of a cut sequence, kept from its first backward to its last. Like the
    others of `COUNTED` in no cost model (`core.planning.setting.stage_costs`)."""
    input_bytes_per_token: NonNegativeFloat = Field(default=0.0, exclude=True)
    """The input of one layer; a replayed micro-batch keeps that of its stage (the first stage has the token ids)."""
    deferred_bytes_per_token: NonNegativeFloat = Field(default=0.0, exclude=True)
    """All layers together, kept from a split backward to its W: inputs of linear layers, gradients of their outputs."""
    expert_bytes_per_token: NonNegativeFloat = Field(default=0.0, exclude=True)
    """All layers together: the part of a token's activations that lies at its experts, where ranks share these."""
    fit_error: float | None = None
    """Mean absolute relative error of predicted peaks over the plans that were measured."""

    def of_stage(self, layout: Layout, shares: Mapping[str, float] = NO_SHARES) -> MemoryCost:
        """One pipeline stage of one tensor-parallel rank; head and single layers are those of their stage, whole, and
        what is there between steps or in the update is that of all stages of a device.

        Weights are taken to be spread evenly over stages. ``shares``: of a tensor-parallel rank, of fields of which it
        has more than its part (`core.costs.kept_values`).
        """
        of_all = {name: layout.pp if name in OF_DEVICE else layout.num_stages for name in AMOUNTS}
        parts = {name: 1 if name in NOT_OF_ALL_LAYERS else of_all[name] for name in AMOUNTS}
        held = {name: getattr(self, name) * shares.get(name, 1.0 / layout.tp) for name in AMOUNTS}
        return self.model_copy(update={name: held[name] / count for name, count in parts.items()})

    def of_model(self, tp: int, shares: Mapping[str, float] = NO_SHARES) -> MemoryCost:
        """The model of which these bytes are those of one tensor-parallel rank: `of_stage` backwards."""
        whole = {name: getattr(self, name) / shares.get(name, 1.0 / tp) for name in AMOUNTS}
        return self.model_copy(update=whole)

    def of_share(self, share: float) -> MemoryCost:
        """What a stage with so many times the layers holds; embedding and output layer lie on stages as layers do."""
        names = (name for name in AMOUNTS if name not in NOT_OF_ALL_LAYERS)
        return self.model_copy(update={name: getattr(self, name) * share for name in names})

    def folded(self, layout: Layout) -> MemoryCost:
        """What each rank holds where ``layout.cp`` ranks act as one, a token of whose work lies on each in part."""
        cp = layout.cp
        changes = {name: getattr(self, name) / cp for name in AMOUNTS if name.endswith("_per_token")}
        # What these ranks divide between them is not there cp times.
        sharded_bytes = self.sharded_bytes / cp
        gathered_bytes = self.gathered_bytes if layout.dp == 1 else 0.0
        fixed_bytes = self.fixed_bytes - self.sharded_bytes + sharded_bytes + gathered_bytes
        return self.model_copy(update=changes | {"sharded_bytes": sharded_bytes, "fixed_bytes": fixed_bytes})


AMOUNTS = tuple(name for name in MemoryCost.model_fields if name != "fit_error")
"""The fields that are bytes."""
_SINGLE = ("head", "head_working", "working", "input")
NOT_OF_ALL_LAYERS = frozenset({"pass_bytes", *(f"{name}_bytes_per_token" for name in _SINGLE)})
"""The fields whose bytes are those of one layer, or of the head."""
OF_DEVICE = frozenset({"fixed_bytes", "sharded_bytes", "gathered_bytes", "update_bytes"})
"""The fields whose bytes are those of a device, however many stages it has."""
COUNTED = frozenset(f"{name}_bytes_per_token" for name in ("kv_grad", "input", "deferred", "expert"))
"""The fields that no cost model gives, since a recipe's shape and precision say them."""
NO_MEMORY = MemoryCost()


@dataclass(frozen=True)
class Limits:
    """What the trainer and the machine allow; `laws.check` holds every plan to it."""

    num_ranks: int
    max_tokens: int
    """Tokens (padding included) that one rank may hold in one micro-batch."""
    num_stages: int = 1
    layers_per_stage: int = 1
    """The most of any stage."""
    in_step: int = 1
    """So many neighbouring ranks run every pass together, as they share experts; 1: none do."""
    all_in_step: bool = False
    """All ranks run passes of one kind together, without pipeline stages; the trainer fills gaps with dummies (ZeRO
    3)."""
    max_activation_bytes: float = float("inf")
    """Activations and prefix KV that one rank of one stage may hold at once."""
    memory: MemoryCost = NO_MEMORY
    """Bytes that the work of one stage takes on one tensor-parallel rank."""
    whole_sequences: bool = False
    """The host runs whole sequences only, forward and backward of one micro-batch after the other."""
    heads: int = 0
    """Query heads of one tensor-parallel rank, which ranks that share heads divide; 0: not known."""
    node_ranks: int = 0
    """Neighbouring plane ranks that share a node; 0: all do."""
    splits_backward: bool = False
    """The host can run weight gradients as passes of their own (W)."""
    equal_size: bool = False
    """Every rank has as many groups of sequences as another, or as many sequences where there are no groups; one more
    where their number cannot be divided."""
    groups_in_micro_batch: bool = False
    """A group of sequences is in one micro-batch, and not just on the same ranks."""
    padded: bool = False
    """The model keeps apart only what stands in different rows: the sequences of a micro-batch are whole, and padded
    to one length."""
    round_tokens: int = 1
    """The tokens of a micro-batch with slices, on one rank and not in padded rows, are a multiple of this."""
    largest_first: bool = False
    """Every rank runs its largest micro-batches first, where nothing else says their order."""
    v_shape: bool = False
    """Each device of a pipeline has two stages, device r the stages r and num_stages - 1 - r (`v_shape`)."""
    layers: tuple[int, ...] = ()
    """Of each stage, where not all have equally many; what is said of a stage is then said of a mean one (`at`)."""

    @cached_property
    def _of_stages(self) -> tuple[Limits, ...]:
        return tuple(
            replace(self, layers_per_stage=own, layers=(), memory=self.memory.of_share(share_of(self.layers, stage)))
            for stage, own in enumerate(self.layers)
        )

    def at(self, stage: int) -> Limits:
        """These limits with the layers and the memory of one stage."""
        return self._of_stages[stage] if self.layers else self

    @property
    def mean_layers(self) -> float:
        """Layers of a mean stage, whose bytes ``memory`` has."""
        return sum(self.layers) / len(self.layers) if self.layers else self.layers_per_stage

    def under(self, max_tokens: int | None, activation_gib: float | None = None) -> Limits:
        """These limits under further caps on tokens and activations [GiB]; None caps nothing."""
        held_bytes = activation_gib * GIB if activation_gib else self.max_activation_bytes
        return replace(
            self,
            max_tokens=min(max_tokens or self.max_tokens, self.max_tokens),
            max_activation_bytes=min(held_bytes, self.max_activation_bytes),
        )

    def held_to(self, caps: Limits) -> Limits:
        """These limits under what a recipe promises of every plan that runs."""
        return replace(
            self,
            max_tokens=min(self.max_tokens, caps.max_tokens),
            max_activation_bytes=min(self.max_activation_bytes, caps.max_activation_bytes),
            equal_size=caps.equal_size,
            groups_in_micro_batch=caps.groups_in_micro_batch,
            padded=caps.padded,
            round_tokens=caps.round_tokens,
            largest_first=caps.largest_first,
        )

    @property
    def together(self) -> int:
        """So many neighbouring ranks wait for each other in every pass, for whatever reason."""
        return self.num_ranks if self.all_in_step else self.in_step

    @property
    def num_devices(self) -> int:
        """How many devices a pipeline has."""
        return self.num_stages // 2 if self.v_shape else self.num_stages

    def stages_of_device(self, device: int) -> tuple[int, ...]:
        """The stages that a device of a pipeline has, ascending."""
        return (device, self.num_stages - 1 - device) if self.v_shape else (device,)

    def device_of_stage(self, stage: int) -> int:
        """The device of a pipeline that has a stage."""
        return min(stage, self.num_stages - 1 - stage) if self.v_shape else stage

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks, stages, and ranks in step."""
        return self.num_ranks, self.num_stages, self.in_step
