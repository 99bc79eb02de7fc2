"""What the trainer and the machine allow a plan: caps, counts, and the bytes that its work takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Beside(NamedTuple):
    """Bytes that `core.costs.memory` counts beside activations and prefix KV, for one stage of one tensor-parallel
    rank."""

    cut_saves_bytes_per_token: float = 0.0
    """Per token and layer: what a token of a cut sequence keeps less, as its K and V are in the store already; in
    micro-batches of cut sequences alone."""
    head_bytes_per_token: float = 0.0
    """Per token at the last stage: logits and what else the output layer and the loss keep for the backward."""
    head_working_bytes_per_token: float = 0.0
    """Per token at the last stage: what output layer and loss take while they run."""
    working_bytes_per_token: float = 0.0
    """Per token: what the backward of one layer takes while it runs."""
    pass_bytes: float = 0.0
    """What any pass takes while it runs, however many tokens: the gradient of one weight before it is added up."""
    gradient_bytes: float = 0.0
    """Gradients that the trainer makes in a step's first backward; 0 where they are there throughout."""


NOTHING_BESIDE = Beside()


@dataclass(frozen=True)
class Limits:
    """What the trainer and the machine allow; `laws.check` holds every plan to it."""

    num_ranks: int
    max_tokens: int
    """Tokens (padding included) that one rank may hold in one micro-batch."""
    num_stages: int = 1
    layers_per_stage: int = 1
    equal_counts: bool = False
    """Every rank must run the same number of micro-batches (ZeRO-3, expert parallelism)."""
    max_activation_bytes: float = float("inf")
    """Activations and prefix KV that one rank of one stage may hold at once."""
    activation_bytes_per_token: float = 0.0
    """Per token and layer, kept from forward to backward when nothing is recomputed."""
    kv_bytes_per_token: float = 0.0
    """Per token and layer: K and V of a sequence that is cut, kept for its later slices."""
    kv_grad_bytes_per_token: float = 0.0
    """Per token and layer: dK and dV of a cut sequence, kept from its first backward to its last."""
    replay_bytes_per_token: float = 0.0
    """Per token and layer while a replayed micro-batch runs backward; 0 means ``activation_bytes_per_token``."""
    input_bytes_per_token: float = 0.0
    """Per token: the stage input that a replayed micro-batch keeps (the first stage has the token ids instead)."""
    beside: Beside = NOTHING_BESIDE
    whole_sequences: bool = False
    """The host runs whole sequences only, forward and backward of one micro-batch after the other."""
    heads: int = 0
    """Query heads of one tensor-parallel rank, which ranks that share heads divide; 0: not known."""
    node_ranks: int = 0
    """Neighbouring plane ranks that share a node; 0: all do."""
    splits_backward: bool = False
    """The host can run weight gradients as passes of their own (W)."""
    deferred_bytes_per_token: float = 0.0
    """Per token and layer, kept from a split backward to its W: inputs of linear layers, gradients of their outputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks and stages."""
        return self.num_ranks, self.num_stages
