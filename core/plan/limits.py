"""What the trainer and the machine allow a plan: caps, counts, and the bytes that its work takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .memory_cost import NO_MEMORY, MemoryCost

GIB = 1 << 30
"""Bytes."""


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

    def under(self, max_tokens: int | None, activation_gib: float | None = None) -> Limits:
        """The same under further caps on tokens and activations [GiB]; None caps nothing."""
        held_bytes = activation_gib * GIB if activation_gib else self.max_activation_bytes
        return replace(
            self,
            max_tokens=min(max_tokens or self.max_tokens, self.max_tokens),
            max_activation_bytes=min(held_bytes, self.max_activation_bytes),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks and stages."""
        return self.num_ranks, self.num_stages
