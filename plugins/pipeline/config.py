"""The pipeline section of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from ...core.input.bounds import Amount, Count, CountOrNone, Effort, TokenCount
from ...core.plan.limits import Limits
from ...core.registry import PluginConfig


class PipelineConfig(PluginConfig):
    """In which order chunks run forward and backward at each pipeline stage, and what is recomputed there."""

    max_tokens: TokenCount = 16384
    """Tokens that one rank may hold in one micro-batch; of several plugins' caps the least holds."""
    chunks: Count = 64
    """Most chunks of one sequence, unless max_tokens demands more. 1: sequences are not cut."""
    block_tokens: TokenCount = 4
    """Chunks start at multiples of this."""
    activation_gib: Amount | None = None
    """Activations and prefix KV that one rank of one stage may hold [GiB]; layers are recomputed where they do not fit.
    Null: what the cluster's memory leaves."""
    recompute: Literal["auto", "off"] = "auto"
    """auto: at each stage as many layers of each chunk as its memory demands. off: what train.recompute says."""
    split_backward: Literal["auto", "on", "off"] = "auto"
    """Weight gradients as passes of their own, run where a stage would wait. auto: where that is predicted to be faster
    and the host can."""
    v_shape: bool = False
    """Each of parallel.pp devices has two stages of half the layers, device 0 the first and the last of them (ZBV).
    It says where layers lie, so it holds for every step of a run; twice parallel.pp must divide model.num_layers."""
    max_extra: CountOrNone = 4
    """Most forwards that a stage may run ahead for each stage after it, beyond the one of 1F1B, where memory holds
    them. Fewer are tried as well."""
    solver_ms: Effort = 100
    """About how long one program for what is recomputed may take (PuLP, HiGHS), told by its size so that all ranks find
    the same; 0: greedy rules alone."""

    @field_validator("recompute", "split_backward", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """YAML reads bare ``on`` and ``off`` as booleans."""
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    def folded(self, num_ranks: int) -> PipelineConfig:
        return self.model_copy(update={"max_tokens": self.max_tokens * num_ranks})

    def uncut(self) -> PipelineConfig:
        return self.model_copy(update={"chunks": 1})

    def capped(self, limits: Limits) -> Limits:
        return limits.under(self.max_tokens, self.activation_gib)
