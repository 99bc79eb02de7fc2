"""What a planner may know of its machine and model: costs, cluster, layout, and what moves between ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..machine.cluster import Cluster
from ..machine.layout import Layout, share_of
from ..plan.step_plan import CpComm
from .costs import Costs, PassCost, Sharding


@dataclass(frozen=True)
class Traffic:
    """What a pipeline stage of one tensor-parallel rank moves [bytes]; `core.costs.exposed` says how long that takes.

    Zero means that nothing moves, so the default predicts compute alone.
    """

    layers: float = 1
    """Layers of a stage, or of a mean one; ``query`` and ``kv`` are of all of them together."""
    state_bytes_per_token: float = 0.0
    handed_frac: float = 1.0
    """The part of them that a rank hands on to the next stage; its tensor-parallel peers hand on the others."""
    query_bytes_per_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    """K and V together."""
    kv_grad_frac: float = 1.0
    """Bytes of dK and dV over those of K and V: 2 where half precision is summed in float32."""
    heads: int = 0
    """Query heads of one tensor-parallel rank; 0: not known, then ranks that share heads divide them evenly."""
    cp_comm: CpComm = "ring"
    """Of micro-batches on several ranks that name none: what the trainer's static context parallelism does."""
    gradient_bytes: float = 0.0
    weight_bytes: float = 0.0
    sharding: Sharding = "none"
    overlap_gradients: bool = False
    """The gradient sum runs while the last backward of the step does."""
    waits_for_sends: bool = False
    """A stage of the host's own schedule goes on only when its output has arrived."""
    expert_bytes_per_token: float = 0.0
    """Hidden states a token sends to experts, all MoE layers together, one way; as much comes back."""
    moe_layers: int = 0
    """Layers of a stage that have experts: so often tokens go to them and back in a pass."""
    expert_frac: float = 0.0
    """Share of ``gradient_bytes`` and ``weight_bytes`` that is experts': only every ep-th rank has the same ones."""
    expert_weight_bytes: float = 0.0
    """Weights of experts that a rank takes in for one pass of a micro-batch."""
    adapter_bytes: float = 0.0
    """Values of all tenants' adapters: their gradients are summed at the end of a step, however the model's are, and
    the values come back from the ranks that updated them."""

    def of_share(self, layers: int, share: float) -> Traffic:
        """What a stage of so many layers moves, ``share`` times those of this one."""
        names = ("query", "kv", "expert")
        changes = {f"{name}_bytes_per_token": getattr(self, f"{name}_bytes_per_token") * share for name in names}
        changes |= {name: getattr(self, name) * share for name in ("gradient_bytes", "weight_bytes")}
        return replace(self, layers=layers, moe_layers=round(self.moe_layers * share), **changes)


NO_TRAFFIC = Traffic()


class ExpertContext(NamedTuple):
    """What a planner of layers may know of the model's experts before a step."""

    num_experts: int
    """Of each layer that has any."""
    layers: tuple[int, ...]
    """Numbers of these layers in the whole model, from 0."""
    num_layers: int
    """Of the whole model."""
    weight_bytes: float
    """Of one expert."""
    once_topk: int = 0
    """Experts of a token, where the trainer can send it once to each node that has any of them; 0: it cannot."""
    loads: tuple[tuple[float, ...], ...] = ()
    """Tokens of each expert of each of ``layers`` in the steps so far, newer ones counting more; empty: none known."""


@dataclass(frozen=True)
class PlanningContext:
    """What a plugin may know when it plans: costs and traffic of a stage, machines, layout. Never tokens or torch."""

    costs: Costs
    layout: Layout
    cluster: Cluster
    traffic: Traffic = NO_TRAFFIC
    head_frac: float = 0.0
    """Share of the linear work outside experts that is the output layer's: the last pipeline stage has it alone."""
    experts: ExpertContext | None = None
    """None in a dense model."""
    forward_only: bool = False
    """Plans run forward only: backwards move nothing, and no gradients are summed (`core.planning.forward_only`)."""
    frozen: bool = False
    """The model stays as it is: it has no weight gradients, and none are summed."""

    @cached_property
    def _of_stages(self) -> tuple[PlanningContext, ...]:
        layers, alike = self.layout.layers, replace(self.layout, layers=())
        shares = {own: share_of(layers, stage) for stage, own in enumerate(layers)}
        contexts = {
            own: replace(
                self, costs=self.costs.of_share(share), traffic=self.traffic.of_share(own, share), layout=alike
            )
            for own, share in shares.items()
        }
        return tuple(contexts[own] for own in layers)

    @cached_property
    def without_recomputation(self) -> PlanningContext:
        """This context where the recipe recomputes nothing."""
        return replace(self, costs=self.costs.kept())

    def at(self, stage: int) -> PlanningContext:
        """Costs and traffic of a stage with its own number of layers; the output layer's part is `beyond` them."""
        return self._of_stages[stage] if self.layout.layers else self

    def layers_at(self, stage: int) -> int:
        """Equal for stages with equally many layers."""
        return self.layout.layers[stage] if self.layout.layers else 0

    def beyond(self, stage: int, num_stages: int) -> float:
        """Linear work outside experts of one of so many stages beyond what `at` has of it, over that: the last one has
        the whole output layer, the others have not the part that is in a mean stage's costs."""
        head = self.head_frac if num_stages > 1 else 0.0
        if stage < num_stages - 1:
            return -head
        return head * (num_stages / share_of(self.layout.layers, stage) - 1)

    def runs(self, passes: int) -> bool:
        """Whether passes of a direction (`Direction.passes`) run at all."""
        return passes == 1 or not self.forward_only


class Direction(NamedTuple):
    """The passes of one direction at a stage, as far as communication goes."""

    cost: PassCost
    """What computing costs, which hides communication."""
    passes: int
    """1 where values move (forward), 2 where their gradients move as well (backward)."""
    stage: int = 0
