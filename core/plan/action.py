"""One entry of a rank's program: what it computes, or takes from and gives to other stages and the tape."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .step_plan import MicroBatch, Op

ActionKind = Literal[
    "receive", "keep_input", "forward", "forward_kv", "recompute_forward", "backward", "weight_grads", "send", "score"
]
"""receive, send: a stage's input (F) or the gradient of its output (B), from or to the neighbour. keep_input: the input
waits on the tape for a recompute_forward. forward: its activations wait for the backward. forward_kv: without gradients
and without the head; only keys, values and the next stage's input are wanted of it. recompute_forward: the forward of a
backward that kept nothing. backward. weight_grads: those that a backward has left."""

LETTERS: dict[ActionKind, str] = {
    "forward": "F",
    "forward_kv": "f",
    "recompute_forward": "R",
    "backward": "B",
    "weight_grads": "W",
    "score": "F",
}
"""How a grid shows what computes."""

DUMMY = MicroBatch((), ())
"""Stands for: run one token of no weight, so that the trainer does on this rank what it does on its peers."""


class Action(NamedTuple):
    """What a rank does next."""

    kind: ActionKind
    op: Op
    """The pass of the plan that it belongs to; the number of a dummy that the plan does not have is -1."""
    micro_batch: MicroBatch
    """What runs or travels: of a forward_kv only the slices that are wanted."""
    graph: int = -1
    """Ties a backward to the forward that made its graph; the number of the backward. -1: there is no graph."""
    recomputed: int | None = 0
    """So many layers of the stage, the first ones, run again in the backward; None: what the recipe says."""
    offload: float = 0.0
    """The share of the inner layers' activations that waits in host memory for the backward."""
    defers_wgrad: bool = False
    """The backward of this graph leaves its weight gradients to a weight_grads."""

    @property
    def computes(self) -> bool:
        return self.kind in LETTERS

    @property
    def is_shared(self) -> bool:
        return len(self.micro_batch.ranks) > 1

    @property
    def cell(self) -> str:
        """Two or three characters for a grid: ``F3``; a dummy is ``F-``."""
        number = "-" if self.op.micro_batch < 0 else str(self.op.micro_batch)
        return LETTERS.get(self.kind, "") + number
